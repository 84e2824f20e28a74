"""Every task of the installed reasoning-gym: its right answer scores full and another does not, or its scorer evaluates text."""

import json

import pytest

from aligner.rewards.text import ExactVerifier
from aligner.rewards.text_evaluation import evaluating_call
from aligner.rewards.verifiers import TaskVerifier

reasoning_gym = pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS  # noqa: E402

# Off unless reward.allow_eval=true. The first call within score_answer that evaluates text, read in the source of reasoning-gym 0.1.25;
# a scorer that is new here must be looked at.
UNSAFE = {
    "binary_matrix": "eval of the response",
    "bitwise_arithmetic": "eval of its own problem",
    "composite": "hands scoring to tasks of its settings",
    "countdown": "sympy's parser reads the response",
    "intermediate_integration": "sympy's parser reads the response",
    "n_queens": "eval of the response",
    "number_sorting": "eval of its own answer",
    "polynomial_multiplication": "sympy's parser reads the response",
    "puzzle24": "sympy's parser reads the response",
    "simple_integration": "sympy's parser reads the response",
    "spiral_matrix": "eval of the response",
    "string_insertion": "eval of the response",
}
# Off: bool(text) == bool(answer), so that every text is right
USELESS = {"game_of_life_halting"}
SAFE = sorted(set(DATASETS) - set(UNSAFE) - USELESS)
SMALL = {  # tasks whose usual problems take long to solve by hand
    "rush_hour": {"min_moves": 1, "max_moves": 1},
    "boxnet": {"min_row_num": 1, "max_row_num": 1, "min_column_num": 2, "max_column_num": 2},
}


def boxes_home(state):
    """boxnet on two squares: a box goes to the other square where its target is not in its own, then to its target."""
    steps = []
    for square, items in state.items():
        (other,) = set(state) - {square}
        for box in [item for item in items if item.startswith("box_")]:
            target, at = box.replace("box_", "target_"), square
            if target not in items:
                steps.append(
                    {f"Agent[{square.replace('_', ', ')}]": f"move({box}, square[{other.replace('_', ', ')}])"}
                )
                at = other
            steps.append({f"Agent[{at.replace('_', ', ')}]": f"move({box}, {target})"})
    return json.dumps(steps)


# tasks with many right answers give none: one is found in what the problem tells, or worked out here
WORKED_OUT = {
    "boxnet": lambda facts: boxes_home(facts["initial_state"]),
    "graph_color": lambda facts: json.dumps(facts["possible_answer"]),
    "propositional_logic": lambda facts: facts["example_answer"],
    "rubiks_cube": lambda facts: facts["example_correct_answer"],
    "rush_hour": lambda facts: (
        f"A+{5 - facts['board_config'].index('A') % 6}"
    ),  # nothing stands between the red car and the exit
}


# where the answer to another problem may well be right
WRONG = {"propositional_logic": "(P ∧ ¬P)"}


def right(entry):
    if entry["answer"] is not None:
        return str(entry["answer"])
    return WORKED_OUT[entry["metadata"]["source_dataset"]](entry["metadata"])


def test_which_scorers_evaluate_text():
    assert sorted(name for name, (dataset, _) in DATASETS.items() if evaluating_call(dataset)) == sorted(UNSAFE)


@pytest.mark.parametrize("task", sorted(set(UNSAFE) - {"composite"}))
def test_a_scorer_that_evaluates_text_needs_permission(task):
    sample = {"task": task, "config": {"size": 2}, "seed": 1, "index": 0, "ended": True}
    with pytest.raises(ValueError, match=f"the scorer of {task} evaluates text .* reward.allow_eval=true"):
        TaskVerifier(answer="task", format_credit=0.0, allow_eval=False).prepare(sample)
    allowed = TaskVerifier(answer="task", format_credit=0.0, allow_eval=True)
    prepared = allowed.prepare(sample)
    assert allowed.score(prepared, right(prepared[1]), sample)["accuracy"] == 1.0


@pytest.mark.parametrize("task", sorted(USELESS))
def test_a_scorer_that_accepts_any_text_is_refused(task):
    sample = {"task": task, "config": {"size": 2}, "seed": 1, "index": 0, "ended": True}
    with pytest.raises(
        ValueError, match=f"the scorer of {task} in this reasoning-gym accepts any text: reward.kind=exact"
    ):
        TaskVerifier(answer="task", format_credit=0.0, allow_eval=False).prepare(sample)
    exact = ExactVerifier(answer_field="answer", extract=None, ignore_case=False)
    assert [exact.score(exact.prepare(sample), text, sample)["reward"] for text in ("False", "True")] == [1.0, 0.0]


@pytest.mark.parametrize("task", SAFE)
def test_a_task_tells_right_from_wrong(task):
    verifier = TaskVerifier(answer="task", format_credit=0.0, allow_eval=False)
    config = {"size": 10, **SMALL.get(task, {})}
    sample = {"task": task, "config": config, "seed": 1, "index": 0, "ended": True}
    prepared = verifier.prepare(sample)
    answer = right(prepared[1])
    assert verifier.score(prepared, f"{answer}\n", sample)["accuracy"] == 1.0
    others = (right(verifier.prepare({**sample, "index": index})[1]) for index in range(1, 10))
    other = WRONG.get(task) or next((found for found in others if found != answer), "something else")
    for response in (other, "", "zebra 9 crossing", "[[1]]", '{"a": 1}'):
        scored = verifier.score(prepared, response, sample)
        assert 0 <= scored["accuracy"] < 1, response
