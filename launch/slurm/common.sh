# shellcheck shell=bash
# Sourced by the batch scripts: starts a job's steps, passes signals on, and decides what follows when they have ended.
#
# What it needs to know comes in the environment, from submit_ppo.sh or submit_job.sh: ALIGNER_ROOT, ALIGNER_RUN, ALIGNER_PYTHON and the
# settings of docs/cluster.md. SIGUSR1 to the batch script (Slurm sends it before the time limit) asks to save and to go on in another
# slice of time, SIGINT to save and to end. SIGTERM comes with scancel, which has sent it to the ranks too.

set -uo pipefail
: "${ALIGNER_ROOT:?start this by launch/slurm/submit_ppo.sh or submit_job.sh}" "${ALIGNER_RUN:?}" "${ALIGNER_PYTHON:?}"
LEAD=${ALIGNER_SIGNAL_BEFORE:-300}   # seconds between SIGUSR1 and the time limit
RESTARTS=${ALIGNER_RESTARTS:-2}      # how often each step is started again in this allocation
POLL=${ALIGNER_PEER_POLL:-30}        # seconds between looks at the other jobs
PEER_WAIT=${ALIGNER_PEER_WAIT:-150}  # seconds for another job to get its nodes, before this one gives its own back
END_WAIT=${ALIGNER_END_WAIT:-60}     # seconds for a step to end by itself when the other job has ended
STALLS=${ALIGNER_STALLS:-5}          # requeues in a row that no new checkpoint came between
STATE=$ALIGNER_RUN/slurm
FILES=$STATE/$SLURM_JOB_ID
declare -A PID=() CODE=() TRIES=()   # of each step, by name: its srun, its exit code once it has ended, its restarts
STOP="" STOP_AT=0 TOLD=0             # why the steps were told to stop: limit or user
GONE="" GONE_AT=0 MISSED=0           # the other job that has ended, and since when
LOOKED=$SECONDS SLOW=""              # SLOW: a step that is told to stop last, for the others need it to save

mkdir -p "$STATE"
rm -f "$FILES.waits"
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE   # torchrun's, of the shell that submitted: they would count before Slurm's
trap 'told limit' USR1
trap 'told user' INT
trap : TERM

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

nap() { # a trap interrupts `wait`, and never `sleep`
  sleep "$1" &
  wait $!
}

# ---- steps

# start_step NAME SRUN_ARGUMENT... -- COMMAND...; the same again by `start_step NAME`
start_step() {
  local name=$1
  declare -n words=WORDS_$name
  shift
  (($#)) && words=("$@")
  rm -f "$FILES.$name.code"
  CODE[$name]=""
  ALIGNER_EXIT_FILE=$FILES.$name.code srun "${words[@]}" &
  PID[$name]=$!
}

# srun_words NODES TASKS_PER_NODE: the array SRUN. Tasks a node are always said: `-N2 -n4` alone may put three on one node.
srun_words() {
  SRUN=(--nodes "$1" --ntasks "$(($1 * $2))" --ntasks-per-node "$2" --kill-on-bad-exit=1 --wait=0 --mpi=none)
  if [[ -n ${ALIGNER_CPUS_PER_TASK:-} ]]; then SRUN+=(--cpus-per-task "$ALIGNER_CPUS_PER_TASK"); fi
  if [[ -n ${ALIGNER_CONTAINER_IMAGE:-} ]]; then # pyxis
    SRUN+=(--container-image="$ALIGNER_CONTAINER_IMAGE" --container-workdir="$PWD")
    if [[ -n ${ALIGNER_CONTAINER_MOUNTS:-} ]]; then SRUN+=(--container-mounts="$ALIGNER_CONTAINER_MOUNTS"); fi
  fi
  local more=()
  if [[ -n ${ALIGNER_SRUN_ARG:-} ]]; then mapfile -t more <<<"$ALIGNER_SRUN_ARG"; fi
  SRUN+=("${more[@]}")
}

runs() { kill -0 "${PID[$1]}" 2>/dev/null; }

# tend NAME: true while the step runs, or was started again because it had died.
tend() {
  runs "$1" && return 0
  [[ -n ${CODE[$1]} ]] && return 1
  local code
  wait "${PID[$1]}"
  code=$?
  # Rank 0's own code: srun's is the highest of all ranks, those included that were killed because one had ended.
  [[ -s $FILES.$1.code ]] && read -r code <"$FILES.$1.code"
  CODE[$1]=$code
  say "$1: exit code $code"
  may_restart "$1" || return 1
  TRIES[$1]=$((${TRIES[$1]:-0} + 1))
  say "$1: starting it again ($((RESTARTS - TRIES[$1])) more times at most)"
  start_step "$1"
}

# Whether it died, and could come back here. 0, 85 and 130 are ends as wished; 2, 3 and 4 would come again.
may_restart() {
  case ${CODE[$1]} in 0 | 2 | 3 | 4 | 85 | 130) return 1 ;; esac
  [[ -z $STOP$GONE ]] && ((${TRIES[$1]:-0} < RESTARTS)) && ! cancelled && [[ -z $(waiting_peer) ]]
}

# ---- signals

told() {
  [[ -n $STOP ]] && return
  STOP=$1 STOP_AT=$SECONDS
  say "told to stop ($1): the step that runs is ended and saved"
  pass_on
}

pass_on() { # srun hands SIGUSR1 to every rank; SIGTERM would make it kill them
  local name
  for name in "${!PID[@]}"; do [[ $name = "$SLOW" ]] || kill -USR1 "${PID[$name]}" 2>/dev/null; done
}

# look_around NAME: once a second while steps run.
look_around() {
  nap 1
  if [[ -n $STOP ]]; then
    local left=$((STOP_AT + LEAD - 20 - SECONDS))
    if [[ -n $SLOW ]] && ((left < 30)); then
      SLOW=""
      pass_on
    fi
    if ((TOLD < 3 && SECONDS - STOP_AT > 5 * TOLD + 2)); then # srun loses a signal that comes before its ranks are there
      TOLD=$((TOLD + 1))
      pass_on
    fi
    ((left > 0)) || out_of_time
  fi
  if ((SECONDS - LOOKED >= POLL)); then
    LOOKED=$SECONDS
    look_for_peers "$1"
    release_peers
  fi
  if [[ -n $GONE ]] && ((SECONDS - GONE_AT > END_WAIT)); then kill_steps; fi
}

kill_steps() {
  local name
  for name in "${!PID[@]}"; do kill -TERM "${PID[$name]}" 2>/dev/null; done
}

out_of_time() {
  say "nothing was saved within $((LEAD - 20)) s of the signal (--signal-before): the run goes on from its newest checkpoint"
  if [[ $STOP = limit ]]; then requeue requeue; fi
  kill_steps
}

# ---- the other jobs of the run

peers() {
  if [[ -n ${ALIGNER_PEERS:-} ]]; then echo "$ALIGNER_PEERS"; else cat "$FILES.peers" 2>/dev/null; fi
}

# job_state ID: Slurm's word, GONE where it lists this job but not that one, UNKNOWN where it does not answer.
job_state() {
  squeue -h -j "$SLURM_JOB_ID,$1" -o '%A %T' 2>/dev/null |
    awk -v id="$1" -v own="$SLURM_JOB_ID" '{ s[$1] = $2 } END { print id in s ? s[id] : own in s ? "GONE" : "UNKNOWN" }'
}

cancelled() {
  case $(job_state "$SLURM_JOB_ID") in RUNNING | SIGNALING | UNKNOWN) return 1 ;; esac
}

waiting_peer() {
  local peer
  for peer in $(peers); do [[ $(job_state "$peer") = PENDING ]] && echo "$peer"; done
}

look_for_peers() {
  [[ -z $GONE ]] || return
  local peer lost=""
  for peer in $(peers); do [[ $(job_state "$peer") = GONE ]] && lost=$peer; done
  if [[ -z $lost ]]; then
    MISSED=0
  elif ((++MISSED > 1)); then
    GONE=$lost GONE_AT=$SECONDS
    say "job $GONE of this run has ended (its log: $ALIGNER_RUN/logs): this job ends too"
    if [[ $1 != actor ]]; then # an actor may be about to end well, and gains nothing from a signal
      SLOW=""
      pass_on
    fi
  fi
}

# Jobs that gave their nodes back because this one had none.
release_peers() {
  local peer
  for peer in $(peers); do
    if [[ -e $STATE/$peer.waits && $(job_state "$peer") = PENDING ]] && scontrol release "$peer"; then
      rm -f "$STATE/$peer.waits"
      say "job $peer is released: it waited for this one"
    fi
  done
}

# await_peers: until each has its nodes, up to PEER_WAIT.
await_peers() {
  local peer since=$SECONDS
  for peer in $(peers); do
    while :; do
      case $(job_state "$peer") in
      RUNNING | UNKNOWN) break ;;
      GONE)
        say "error: job $peer, which this one needs, has ended (its log: $ALIGNER_RUN/logs): submit both again"
        leave 3
        ;;
      esac
      if ((SECONDS - since >= PEER_WAIT)); then give_back "$peer"; fi
      nap 2
    done
  done
}

# ---- ends

newest_checkpoint() {
  local file newest=none
  for file in "$ALIGNER_RUN"/checkpoints/step_*/COMMITTED; do [[ -e $file ]] && newest=${file%/COMMITTED}; done
  basename "$newest"
}

# requeue requeue|requeuehold: ends this script where Slurm takes the job back.
requeue() {
  if [[ -n ${ALIGNER_CHAIN:-} ]]; then
    say "the next job of the chain continues"
    exit 85
  fi
  local count=0 before="" newest
  newest=$(newest_checkpoint)
  [[ -s $FILES.requeues ]] && read -r count before <"$FILES.requeues"
  [[ $before = "$newest" ]] || count=0
  if ((count >= STALLS)); then
    say "error: requeued $count times without a new checkpoint (newest: $newest): raise --time or --signal-before, or start the jobs --together"
    leave 1
  fi
  echo "$((count + 1)) $newest" >"$FILES.requeues"
  say "requeueing this job (newest checkpoint: $newest)"
  scontrol "$1" "$SLURM_JOB_ID" || {
    say "error: Slurm does not requeue this job: submit it again, or use --chain N"
    rm -f "$FILES.waits"
    leave 85
  }
  exit 85
}

give_back() {
  say "job $1 waits for nodes: this job gives its own back until then"
  if [[ -z ${ALIGNER_CHAIN:-} ]]; then echo "$1" >"$FILES.waits"; fi
  requeue requeuehold
}

# leave CODE: end this script. A run that is complete, or that was refused, needs no more of its chain.
leave() {
  local rest=()
  if [[ -s ${ALIGNER_CHAIN:-} && $1 != 85 && $1 != 1 ]]; then
    mapfile -t rest <"$ALIGNER_CHAIN"
    scancel --state=PENDING "${rest[@]}" 2>/dev/null
  fi
  exit "$1"
}

# finish NAME: what follows from the exit code of the step NAME.
finish() {
  local code=${CODE[$1]} peer
  peer=$(waiting_peer)
  if cancelled; then
    say "cancelled"
    exit 130 # not `leave`: Slurm may have cancelled it to requeue it
  elif [[ -n $GONE ]]; then
    [[ $code = 0 || $1 != actor ]] && leave_served "$1"
    say "error: job $GONE, which this one needs, has ended: submit both again, and the run goes on from its newest checkpoint"
    leave 3
  elif [[ $STOP = user ]]; then
    leave "$((code == 85 ? 0 : code))"
  fi
  case $code in
  0) if [[ $1 = actor || -z $peer ]]; then leave_served "$1"; fi ;; # else nobody came within serving.idle_timeout
  2 | 4) leave "$code" ;;
  3) ;;
  *) if [[ -n $STOP || $code = 85 ]]; then requeue requeue; fi ;;
  esac
  if [[ -n $peer ]]; then give_back "$peer"; fi
  leave "$code"
}

# Only what leads a run ends its chain.
leave_served() {
  if [[ $1 = critic || $1 = reward ]]; then exit 0; fi
  leave 0
}

# run_alone NAME SCRIPT ARGUMENT...: the one step of a job.
run_alone() {
  local name=$1 script=$2
  shift 2
  srun_words "$SLURM_JOB_NUM_NODES" "${SLURM_NTASKS_PER_NODE:?submit with --ntasks-per-node}"
  start_step "$name" "${SRUN[@]}" -- "$ALIGNER_PYTHON" "$ALIGNER_ROOT/$script" "$@"
  while tend "$name"; do look_around "$name"; done
  finish "$name"
}
