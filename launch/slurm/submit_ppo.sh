#!/bin/bash
# shellcheck source=launch/slurm/options.sh
source "$(dirname "${BASH_SOURCE[0]}")/options.sh"

usage() {
  cat <<'END'
usage: submit_ppo.sh --name NAME [option ...] [--both|--actor|--critic|--reward OVERRIDE ...] ...

Submits the critic job and the actor job of a PPO run: two allocations, or one heterogeneous job with --together. Overrides go to
train_ppo_actor.py (--actor), serve_ppo_critic.py (--critic), serve_reward_model.py (--reward), or to all of them (--both).

  --name NAME              run.name                       --runs DIR               run.dir (default: runs)
  --account A, --qos Q, --partition P, --time T           as for sbatch (also SBATCH_ACCOUNT, SBATCH_PARTITION ...)
  --nodes N                nodes of each job (default: 1; --reward-nodes adds a reward job)
  --gpus-per-node N        (default: none)                --tasks-per-node N       ranks a node (default: one a GPU, or 1)
  --cpus-per-task N
  --config NAME            file of conf/                  --config-dir DIR         a folder of your own files
  --together               one heterogeneous job, whose parts start at the same time
  --chain N                N jobs one after another, for sites that do not requeue; what a complete run leaves of it is cancelled
  --signal-before S        seconds before the time limit at which both jobs save and requeue (default: 300)
  --restarts N             how often a job that died is started again in its allocation (default: 2)
  --container-image I, --container-mounts M               pyxis
  --python PATH            (default: python)
  --sbatch-arg ARG, --srun-arg ARG                        anything else; may be repeated
  --no-check               submit without reading the settings first (as with a container)
  --dry-run                print the sbatch commands, and submit nothing

--nodes, --gpus-per-node, --tasks-per-node, --partition, --time, --config and --sbatch-arg take one job's name in front: --actor-nodes 4.
Each option may also stand in the environment: ALIGNER_ACTOR_NODES=4. docs/cluster.md has more.
END
}

# shellcheck disable=SC2034 # read by their names in small letters
ACTOR=() CRITIC=() REWARD=() BOTH=() SECTION=""
while (($#)); do
  case $1 in
  --both | --actor | --critic | --reward) SECTION=${1#--} TAKEN=1 ;;
  --*) SECTION="" && take "$@" ;;
  *)
    [[ -n $SECTION ]] || fail "'$1' stands before --both, --actor, --critic and --reward: which job is it for?"
    declare -n overrides=${SECTION^^}
    overrides+=("$1") TAKEN=1
    ;;
  esac
  shift "$TAKEN"
done
if [[ -n ${OPTION[help]:-} ]]; then
  usage
  exit 0
fi
prepare
JOBS=(critic)
declare -A SCRIPT=([critic]=serve_ppo_critic.py [reward]=serve_reward_model.py [actor]=train_ppo_actor.py)
if [[ -n $(option reward-nodes) ]]; then JOBS+=(reward) BOTH=(reward.place=server "${BOTH[@]}"); fi
[[ " ${JOBS[*]} " = *" reward "* ]] || ((${#REWARD[@]} == 0)) || fail "--reward has overrides, but there is no reward job: say --reward-nodes 1"
JOBS+=(actor)

words_of() { # words_of JOB: its overrides after those of both
  declare -n own=${1^^}
  job_words "$1" "${BOTH[@]}" "${own[@]}"
}
for job in "${JOBS[@]}"; do
  words_of "$job"
  check "${SCRIPT[$job]}"
done

# dependency TYPE ID...: the array AFTER
dependency() {
  local IFS=:
  AFTER=()
  if (($# > 1)); then AFTER=(--dependency "$*"); fi
}

submit_together() { # submit_together ID...: after these
  local parts=() words=()
  dependency afterany "$@"
  for job in "${JOBS[@]}"; do
    words_of "$job"
    sbatch_words "$job" together
    if ((${#parts[@]})); then parts+=(:); fi
    parts+=("${SBATCH[@]}")
    words+=("$job" "$NODES" "$TASKS" "$((${#WORDS[@]} + 1))" "${SCRIPT[$job]}" "${WORDS[@]}")
  done
  submit "${AFTER[@]}" "${parts[@]}" "$ROOT/launch/slurm/together.sbatch" "${words[@]}"
  tell together "job $JOB_ID  ${JOBS[*]}, log $RUNS/$NAME/logs/slurm-together-$JOB_ID.out"
}

submit_apart() { # submit_apart ID...: after these
  local served=() before=("$@")
  for job in "${JOBS[@]}"; do
    words_of "$job"
    sbatch_words "$job" "$job"
    dependency afterany "${before[@]}"
    unset ALIGNER_PEERS
    if [[ $job = actor ]]; then
      dependency after "${served[@]}"
      export ALIGNER_PEERS="${served[*]}"
    fi
    submit "${AFTER[@]}" "${SBATCH[@]}" "$ROOT/launch/slurm/$job.sbatch" "${WORDS[@]}"
    [[ $job = actor ]] || served+=("$JOB_ID")
    tell "$job" "job $JOB_ID  $NODES x $TASKS ranks, log $RUNS/$NAME/logs/slurm-$job-$JOB_ID.out"
  done
  # Theirs to watch: when it is gone for good, they end.
  [[ -n ${OPTION[dry-run]:-} ]] || for job in "${served[@]}"; do echo "$JOB_ID" >"$RUNS/$NAME/slurm/$job.peers"; done
  LAST=("${served[@]}" "$JOB_ID")
}

LAST=() LEADER=""
for ((link = 1; link <= CHAIN; link++)); do
  if [[ -n ${OPTION[together]:-} ]]; then
    submit_together "${LAST[@]}"
    LAST=("$JOB_ID")
  else
    submit_apart "${LAST[@]}"
  fi
  LEADER=${LEADER:-$JOB_ID}
done
follow "$LEADER" "${SUBMITTED[@]}"
tell status: "$PYTHON -m aligner.serving.status $(printf '%q' "$RUNS/$NAME")/endpoints/critic.json"
SUBMITTED=()
