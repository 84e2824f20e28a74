"""reasoning-gym problems: distinct, split by key without leaks, the same every time, and regenerated from four values."""

import pytest

from aligner.config.groups import DataConfig
from aligner.config.jobs import ActorConfig
from aligner.config.load import load
from aligner.data.splits import from_problem
from aligner.data.tasks import digest, draw_here, draw_problems, held_out, operands, split_problems, wire_fields
from aligner.data.tokenizer import Tokenizer
from tests.unit.tiny_tokenizer import write_tokenizer

reasoning_gym = pytest.importorskip("reasoning_gym")
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def one_digit(key="operands", seed=1234, size=2000):
    return draw_here("chain_sum", ONE_DIGIT, size=size, seed=seed, key=key)


def test_all_200_one_digit_problems_come_up_once():
    problems = one_digit()
    expressions = {p.expression for p in problems}
    assert len(problems) == len(expressions) == 200
    assert expressions == {f"{a} {op} {b}" for a in range(10) for b in range(10) for op in "+-"}
    assert all(str(eval(p.expression)) == p.fields["answer"] for p in problems)


def test_at_least_60_are_held_out_and_no_pair_of_operands_is_on_both_sides():
    train, held = split_problems(one_digit(), DataConfig().holdout)
    assert len(held) >= 60 and len(train) + len(held) == 200
    pairs = [{frozenset(p.expression.replace("-", "+").split(" + ")) for p in side} for side in (train, held)]
    assert not pairs[0] & pairs[1]


def test_the_split_depends_on_the_key_alone():
    """Not on the seed, the number of draws or their order."""
    sides = [split_problems(one_digit(seed=s, size=n), 0.3) for s, n in [(1, 2000), (2, 2000), (1, 500)]]
    held = [{p.question for p in side[1]} for side in sides]
    assert held[0] == held[1] and held[2] < held[0]
    train = [{p.question for p in side[0]} for side in sides]
    assert not train[2] & held[0]


def test_the_same_seed_draws_the_same_problems():
    assert one_digit(size=100) == one_digit(size=100) != one_digit(size=100, seed=7)


def test_the_hash_seed_of_a_process_does_not_show(monkeypatch):
    """isomorphic_strings walks over sets: drawn with the hash seed of each rank, ranks would train on different prompts."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    drawn = draw_problems("isomorphic_strings", {}, size=3, seed=3, key="question")
    assert [p.fields["digest"] for p in drawn] == ["40e915ffd6941594", "3333e59d22880e61", "acf8fb7cc7d47a98"]
    assert all(p.fields["config"] == {"size": 3} and p.key == p.question for p in drawn)


def test_errors_of_the_drawing_process_come_back():
    with pytest.raises(ValueError, match="nearest names are chain_sum"):
        draw_problems("chain_summ", {}, size=1, seed=1, key="question")


def test_keys():
    assert operands("3 + 4") == operands("4 - 3") == operands("-4 + 3") == "3 4"
    assert operands("3 + 3") == "3 3" != operands("3")
    assert operands("12.5 - 3") == "12.5 3"
    with pytest.raises(ValueError, match="data.task_key=operands needs numbers"):
        operands("spell cat backward")
    assert len({p.key for p in one_digit("operands")}) == 55 and len({p.key for p in one_digit("question")}) == 200


def test_the_share_held_out_is_near_what_is_asked():
    assert sum(held_out(str(i), 0.3) for i in range(10_000)) == pytest.approx(3000, abs=150)
    assert not any(held_out(str(i), 0.0) for i in range(100))


def test_a_problem_is_regenerated_from_what_the_wire_carries():
    problem = one_digit(size=50)[-1]
    fields = wire_fields(problem.fields)
    assert set(fields) == {"task", "config", "seed", "index", "digest"}
    entry = reasoning_gym.create_dataset(fields["task"], **fields["config"], seed=fields["seed"])[fields["index"]]
    assert (entry["question"], entry["answer"]) == (problem.question, problem.fields["answer"])
    assert digest(entry) == fields["digest"] and problem.origin == f"chain_sum:{fields['index']}"
    assert wire_fields({"answer": 3}) == {"answer": 3}  # a prompt file's fields go whole


@pytest.mark.parametrize(
    "task,config,settings,message",
    [
        ("chain_summ", {}, {}, "no reasoning-gym task; the nearest names are chain_sum"),
        ("chain_sum", {"min_term": 2}, {}, "has no setting min_term; it has min_terms"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, {}, "chain_sum refuses .*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "2"}, {}, "chain_sum refuses"),
        ("chain_sum", {"seed": 3}, {}, "data.task_config sets seed: use run.seed"),
        ("chain_sum", {"size": 3}, {}, "data.task_config sets size: use .*data.task_size"),
        ("chain_sum", {}, {"key": "operand"}, "neither question nor operands"),
    ],
)
def test_wrong_settings_are_named(task, config, settings, message):
    with pytest.raises(ValueError, match=message):
        draw_here(task, config, **{"size": 10, "seed": 1, "key": "question", **settings})


def test_an_empty_side_is_refused():
    with pytest.raises(ValueError, match="leaves 1 problems to train on and 0 held out, of 1 distinct keys"):
        split_problems([p for p in one_digit(size=50) if not held_out(p.key, 0.3)][:1], 0.3)
    assert split_problems(one_digit(size=50), 0.0)[1] == []


def test_the_shipped_configuration_gives_short_prompts(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    config = load(ActorConfig, ["tasks=chain_sum", "model.checkpoint=x"], "ppo_actor")
    data = config.data
    problems = draw_here(
        data.task, dict(data.task_config), size=data.task_size, seed=config.run.seed, key=data.task_key
    )
    train, held = ([from_problem(p, tokenizer, data) for p in side] for side in split_problems(problems, data.holdout))
    assert len(train) == 138 and len(held) == 62
    assert all(s.prompt == f"What is {s.fields['question'][60:-2]}? Answer with just the number." for s in train)
