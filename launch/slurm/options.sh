# shellcheck shell=bash
# Sourced by submit_ppo.sh and submit_job.sh: their options, and the sbatch command lines that these make.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
declare -A OPTION=() # by name, without dashes
WITH_VALUE=" name runs account partition qos time nodes gpus-per-node tasks-per-node cpus-per-task python config config-dir sbatch-arg"
WITH_VALUE+=" srun-arg container-image container-mounts signal-before restarts chain "
FLAGS=" together dry-run no-check help "
LISTS=" sbatch-arg srun-arg "
OF_ONE_JOB=" partition time nodes gpus-per-node tasks-per-node config sbatch-arg "

fail() {
  echo "error: $*" >&2
  exit 2
}

# take WORD...: store the option at the head of the words. TAKEN says how many words it was.
# shellcheck disable=SC2034 # TAKEN is the caller's
take() {
  local key=${1#--} value
  TAKEN=1
  if [[ $key = *=* ]] && is_option "${key%%=*}"; then
    value=${key#*=} key=${key%%=*}
  elif [[ $FLAGS = *" $key "* ]]; then
    value=yes
  else
    is_option "$key" || fail "there is no option --$key (--help lists them)"
    (($# > 1)) || fail "--$key needs a value"
    value=$2 TAKEN=2
  fi
  if [[ $LISTS = *" ${key#"$(job_prefix "$key")"} "* && -n ${OPTION[$key]:-} ]]; then value=${OPTION[$key]}$'\n'$value; fi
  OPTION[$key]=$value
}

job_prefix() {
  case $1 in actor-* | critic-* | reward-*) echo "${1%%-*}-" ;; esac
}

is_option() {
  [[ $WITH_VALUE = *" $1 "* ]] && return 0
  local prefix
  prefix=$(job_prefix "$1")
  [[ -n $prefix && $OF_ONE_JOB = *" ${1#"$prefix"} "* ]]
}

# option KEY [DEFAULT]: the flag --KEY, else the environment's ALIGNER_KEY, else the default.
option() {
  local variable=ALIGNER_${1^^}
  variable=${variable//-/_}
  if [[ -n ${OPTION[$1]+set} ]]; then echo "${OPTION[$1]}"; else echo "${!variable:-${2:-}}"; fi
}

# job_option JOB KEY [DEFAULT]: --JOB-KEY, else --KEY
job_option() {
  local own
  own=$(option "$1-$2")
  if [[ -n $own ]]; then echo "$own"; else option "$2" "${3:-}"; fi
}

whole() { # whole LEAST KEY VALUE
  if [[ ! $3 =~ ^[0-9]+$ ]] || ((10#$3 < $1)); then fail "--$2 $3 is no whole number of at least $1"; fi
}

# prepare: checks what is common to all jobs, makes the run's folders, and exports what the batch scripts read.
prepare() {
  NAME=$(option name)
  [[ $NAME =~ ^[A-Za-z0-9][A-Za-z0-9._+-]*$ ]] || fail "--name '$NAME' is no name of a run: letters, digits and . _ + - make one"
  RUNS=$(realpath -m -- "$(option runs runs)")
  LEAD=$(option signal-before 300) CHAIN=$(option chain 1)
  whole 30 signal-before "$LEAD"
  whole 1 chain "$CHAIN"
  whole 0 restarts "$(option restarts 2)"
  local image
  image=$(option container-image)
  PYTHON=$(option python python)
  [[ -n $image ]] || command -v -- "$PYTHON" >/dev/null || fail "there is no $PYTHON here: activate the environment, or say --python PATH"
  [[ -n ${OPTION[dry-run]:-} ]] || mkdir -p "$RUNS/$NAME/slurm" "$RUNS/$NAME/logs" || fail "$RUNS/$NAME cannot be made: change --runs"
  # Of an allocation or a torchrun that this shell is in: the jobs have their own.
  local variable
  for variable in ${!SLURM_@}; do [[ $variable = SLURM_CONF ]] || unset "$variable"; done
  unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE ALIGNER_PEERS ALIGNER_CHAIN
  export ALIGNER_ROOT=$ROOT ALIGNER_RUN=$RUNS/$NAME ALIGNER_PYTHON=$PYTHON ALIGNER_SIGNAL_BEFORE=$LEAD
  ALIGNER_RESTARTS=$(option restarts 2) ALIGNER_CPUS_PER_TASK=$(option cpus-per-task) ALIGNER_SRUN_ARG=$(option srun-arg)
  ALIGNER_CONTAINER_IMAGE=$image ALIGNER_CONTAINER_MOUNTS=$(option container-mounts)
  export ALIGNER_RESTARTS ALIGNER_CPUS_PER_TASK ALIGNER_SRUN_ARG ALIGNER_CONTAINER_IMAGE ALIGNER_CONTAINER_MOUNTS
  if ((CHAIN > 1)); then
    export ALIGNER_CHAIN=$RUNS/$NAME/slurm/chain-$$-$RANDOM
    [[ -n ${OPTION[dry-run]:-} ]] || : >"$ALIGNER_CHAIN"
  fi
}

hydra_text() { printf "'%s'" "${1//\'/\\\'}"; } # as the value of an override, whatever it holds

# job_words JOB OVERRIDE...: the array WORDS, the entry script's arguments.
job_words() {
  local job=$1 config dir word
  shift
  for word in "$@"; do
    [[ ! $word =~ ^\+*run\.(name|dir)= ]] || fail "$word: give --name and --runs instead, which all jobs and their logs follow"
  done
  WORDS=()
  config=$(job_option "$job" config)
  dir=$(option config-dir)
  if [[ -n $config ]]; then WORDS+=(--config-name "$config"); fi
  if [[ -n $dir ]]; then WORDS+=(--config-dir "$(realpath -m -- "$dir")"); fi
  WORDS+=("run.name=$NAME" "run.dir=$(hydra_text "$RUNS")")
  # It waits for the actor's pair as long as Slurm lets it.
  if [[ $job = critic ]]; then WORDS+=("serving.drain_timeout=$((LEAD - 25))"); fi
  WORDS+=("$@")
}

# check SCRIPT: settings that would be refused after hours in the queue are refused here.
check() {
  [[ -z ${OPTION[no-check]:-}${ALIGNER_CONTAINER_IMAGE:-} ]] || return 0
  local said
  said=$("$PYTHON" "$ROOT/$1" "${WORDS[@]}" --cfg job 2>&1 >/dev/null) || {
    echo "$said" >&2
    fail "$1 refuses these settings, and nothing was submitted (--no-check submits all the same)"
  }
}

# sbatch_words JOB LOG: the array SBATCH, sbatch's options for a job; NODES and TASKS.
sbatch_words() {
  local job=$1 key value gpus more=() logs=$RUNS/$NAME/logs
  NODES=$(job_option "$job" nodes 1) gpus=$(job_option "$job" gpus-per-node 0)
  TASKS=$(job_option "$job" tasks-per-node "$((gpus > 0 ? gpus : 1))")
  whole 1 "$job-nodes" "$NODES"
  whole 0 "$job-gpus-per-node" "$gpus"
  whole 1 "$job-tasks-per-node" "$TASKS"
  SBATCH=(--job-name "$NAME-$2" --export=ALL --open-mode=append --output "${logs//%/%%}/slurm-$2-%j.out")
  SBATCH+=(--nodes "$NODES" --ntasks-per-node "$TASKS" --signal "B:USR1@$LEAD")
  if ((CHAIN > 1)); then SBATCH+=(--no-requeue); else SBATCH+=(--requeue); fi
  if ((gpus > 0)); then SBATCH+=(--gpus-per-node "$gpus"); fi
  for key in account partition qos time cpus-per-task; do
    value=$(job_option "$job" "$key")
    if [[ -n $value ]]; then SBATCH+=("--$key" "$value"); fi
  done
  value=$(job_option "$job" sbatch-arg)
  if [[ -n $value ]]; then mapfile -t more <<<"$value"; fi
  SBATCH+=("${more[@]}")
}

# submit WORD...: sbatch with these; JOB_ID.
SUBMITTED=()
submit() {
  if [[ -n ${OPTION[dry-run]:-} ]]; then
    printf '%q ' sbatch --parsable "$@"
    echo
    JOB_ID=JOB$((${#SUBMITTED[@]} + 1))
  else
    JOB_ID=$(sbatch --parsable "$@") || fail "sbatch refused a job: see its line above. What was submitted before it is cancelled"
    JOB_ID=${JOB_ID%%;*} # a cluster's name may follow
    if ((CHAIN > 1)); then echo "$JOB_ID" >>"$ALIGNER_CHAIN"; fi
  fi
  SUBMITTED+=("$JOB_ID")
}

# Half of a run would hold its nodes for nothing.
cancel_half() {
  local code=$?
  if ((code)) && [[ -z ${OPTION[dry-run]:-} ]] && ((${#SUBMITTED[@]})); then scancel "${SUBMITTED[@]}"; fi
  exit "$code"
}
trap cancel_half EXIT
trap 'exit 130' INT TERM

tell() { printf '%-8s %s\n' "$@"; }

# follow LEADER ID...: how to watch these jobs, and how to stop them. LEADER is the job whose end ends the others.
follow() {
  local ids leader=$1
  shift
  ((CHAIN == 1)) || leader="JOB   (that of the chain which runs: $leader is the first)"
  ids=$(IFS=,; echo "$*")
  echo
  tell queue: "squeue -j $ids"
  tell logs: "tail -F $(printf '%q' "$RUNS/$NAME/logs")/slurm-*.out"
  tell stop: "scancel --batch --signal=INT $leader   (saves first; the others end with it)"
  tell kill: "scancel ${ids//,/ }"
}
