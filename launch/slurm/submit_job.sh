#!/bin/bash
# shellcheck source=launch/slurm/options.sh
source "$(dirname "${BASH_SOURCE[0]}")/options.sh"

usage() {
  cat <<'END'
usage: submit_job.sh --name NAME [option ...] SCRIPT [OVERRIDE ...]

Submits a run of one job: train_sft.py, train_reward_model.py, or train_ppo_actor.py without a critic job (critic.place=none).

The options are those of submit_ppo.sh (--help there), without --together and the ones of a single job's name.
END
}

while (($#)) && [[ $1 = --* ]]; do
  take "$@"
  shift "$TAKEN"
done
if [[ -n ${OPTION[help]:-} ]]; then
  usage
  exit 0
fi
(($#)) || fail "which script? (--help)"
SCRIPT=$1
shift
[[ -f $ROOT/$SCRIPT ]] || fail "there is no $SCRIPT in $ROOT"
[[ -z ${OPTION[together]:-} ]] || fail "--together is for the jobs of submit_ppo.sh"
prepare
job_words job "$@"
check "$SCRIPT"
sbatch_words job job
for ((link = 1; link <= CHAIN; link++)); do
  AFTER=()
  if ((link > 1)); then AFTER=(--dependency "afterany:$JOB_ID"); fi
  submit "${AFTER[@]}" "${SBATCH[@]}" "$ROOT/launch/slurm/job.sbatch" "$SCRIPT" "${WORDS[@]}"
  tell job "job $JOB_ID  $NODES x $TASKS ranks, log $RUNS/$NAME/logs/slurm-job-$JOB_ID.out"
done
follow "${SUBMITTED[0]}" "${SUBMITTED[@]}"
SUBMITTED=()
