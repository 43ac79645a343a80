# Every target does its own set-up. `make help` lists them.
# Targets on a run take RUN=name (default: the newest) and DIR=folder (default: runs); those on its buffer
# also URL=redis://user@host:port/0, if the run's folder does not contain the address (any more). A password
# comes from LEASH_REDIS_PASSWORD in the environment: every user can see a command line.
# What the command line says of a variable: a shell may hold the HOST, URL or RUN of something else.
said = $(if $(filter command,$(origin $1)),$($1))
# SWITCH_S -> switch-s
option = $(shell echo '$1' | tr A-Z_ a-z-)
# The environment too, as for Ray's own tools.
RAY_ADDRESS ?=

PYTHON_BIN := .venv/bin/python
LEASH := $(PYTHON_BIN) -m controller.main
OVERRIDES := $(if $(RAY_ADDRESS),cluster.ray_address=$(RAY_ADDRESS)) $(call said,ARGS)
EXPERIMENT_FLAG := $(if $(call said,EXPERIMENT),--experiment '$(EXPERIMENT)')
RUN_FLAG := $(if $(call said,RUN),--run $(RUN)) $(if $(call said,DIR),--dir $(DIR))
# With CLUSTER a run has a Ray of its own there. Then nothing is installed: where jobs are submitted there may be no GPU.
$(if $(filter-out slurm ssh k8s,$(call said,CLUSTER)),$(error CLUSTER=$(CLUSTER): choose slurm, ssh or k8s))
THERE := $(if $(call said,CLUSTER),$(foreach name,HOSTS SBATCH LEAD_S IMAGE NODES GPUS CPUS MEMORY SHM CLAIM DRY,$(name)='$(call said,$(name))') deploy/cluster/$(CLUSTER).sh,$(LEASH))
HERE := $(if $(call said,CLUSTER),,install)
BUFFER_FLAG := $(RUN_FLAG) $(if $(call said,URL),--url '$(URL)')

.DEFAULT_GOAL := help
.PHONY: help install install-verifiers lock check-lock launch resume attach dry-run doctor simulate try sandbox runs compare status page stop report export groups tune scale pause unpause timeline stacks depth trace show quarantine buffer-dump buffer-load \
	test test-unit test-machine test-servers test-long test-fast test-times soak soak-lengths soak-hosts soak-healthy soak-faults chaos bench bench-weights bench-rollout bench-checkpoint bench-long-rows bench-packing bench-head bench-models bench-routing bench-e2e bench-learning bench-parity bench-staleness lint format typecheck docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' Makefile

install: ## make .venv (does nothing when it is up to date)
	@deploy/install.sh

install-verifiers: install ## make .venv-verifiers, for environments of the verifiers library
	@deploy/install-verifiers.sh

lock: install ## write the lock files after a change of pyproject.toml or deploy/verifiers.in (ARGS=--upgrade: newer versions too)
	@deploy/lock.sh $(call said,ARGS)

check-lock: install ## check the lock files against both
	@deploy/lock.sh --check

# The teacher of this experiment is what a quickstart has learnt; it is trained first if it is not there.
TEACHER := runs/teacher/final_model
$(TEACHER): | install
	@$(LEASH) launch --experiment quickstart run.name=teacher

launch: $(HERE) $(if $(filter distill-quickstart,$(call said,EXPERIMENT)),$(TEACHER)) ## train: make launch [EXPERIMENT=name or file.yaml] [ARGS="buffer.max_staleness=4 ..."] [RAY_ADDRESS=auto, or CLUSTER=slurm SBATCH="--nodes=4 ...", CLUSTER=ssh HOSTS="a b", CLUSTER=k8s IMAGE=...; DRY=1 prints what it would do]
	@$(THERE) launch $(EXPERIMENT_FLAG) $(OVERRIDES)

resume: $(HERE) ## go on with a run that has ended, from its last checkpoint (RUN=name; ARGS changes settings; CLUSTER as for launch)
	@$(THERE) resume $(RUN_FLAG) $(if $(call said,EXPERIMENT),experiment='$(EXPERIMENT)') $(OVERRIDES)

attach: install ## take over a run whose controller and guard were killed (RUN=name; default: the newest)
	@$(LEASH) attach $(RUN_FLAG)

dry-run: $(HERE) ## print the resolved config and the plan, start nothing: make dry-run [EXPERIMENT=...] [ARGS=...] [RAY_ADDRESS=..., or CLUSTER as for launch] [GPU=H100] [LENGTHS=1000,8000]
	@$(THERE) dry-run $(EXPERIMENT_FLAG) $(foreach name,GPU LENGTHS,$(if $(call said,$(name)),--$(call option,$(name)) '$(call said,$(name))')) $(OVERRIDES)

doctor: $(HERE) ## what a launch would find on each machine, and what to repair: make doctor [EXPERIMENT=...] [ARGS=...] [RAY_ADDRESS=..., or CLUSTER as for launch] [JSON=1]
	@$(THERE) doctor $(EXPERIMENT_FLAG) $(if $(call said,JSON),--json) $(OVERRIDES)

simulate: install ## GPUs for each pool and max_staleness, simulated: make simulate GPUS=64 LENGTHS=1000,8000 ARGS="rollout.max_response_tokens=8000 ..." [GPU=H100] [LENGTHS_OF=runs/NAME] [MTBF_H=50000] [PRICE=2] [PLOT=file.png]
	@$(LEASH) simulate $(EXPERIMENT_FLAG) $(foreach name,GPUS GPU LENGTHS LENGTHS_OF PROMPT PARAMETERS ACTIVE KV MFU WIRE SWITCH_S REWARD_S MTBF_H RESTART_S PRICE STEPS PLOT,$(if $(call said,$(name)),--$(call option,$(name)) '$(call said,$(name))')) $(OVERRIDES)

try: install ## run a few episodes of a task without training: make try TASK=capitals [MODEL=folder | URL=http://host/v1 MODEL=name [KEY_ENV=...]] [EPISODES=4] [ARGS=...]
	@$(LEASH) try $(EXPERIMENT_FLAG) $(if $(call said,URL),--url '$(URL)') $(if $(call said,MODEL),--model '$(MODEL)') $(if $(call said,EPISODES),--episodes $(EPISODES)) $(if $(call said,KEY_ENV),--key-env $(KEY_ENV)) $(if $(call said,TASK),task=$(TASK)) $(call said,ARGS)

sandbox: install ## run programs for code rewards of other machines: make sandbox [TASK=code] [PORT=8080] [HOST=0.0.0.0 KEY_ENV=...] [ARGS=...]
	@$(LEASH) sandbox $(if $(call said,HOST),--host '$(HOST)') $(if $(call said,PORT),--port '$(PORT)') $(if $(call said,KEY_ENV),--key-env $(KEY_ENV)) task=$(or $(call said,TASK),code) $(call said,ARGS)

status: install ## the verdict on a run, and what it is doing [JSON=1: as one object] [FIX=1: run the verdict's command after a yes] [WAITS=1: with the shares of all stages] [RUN=name] (default: the newest)
	@$(LEASH) status $(RUN_FLAG) $(if $(call said,JSON),--json) $(if $(call said,FIX),--fix) $(if $(call said,WAITS),--waits)

runs: install ## all runs of a folder, the newest first, with verdicts and last figures [DIR=runs] [JSON=1]
	@$(LEASH) runs $(if $(call said,DIR),--dir $(DIR)) $(if $(call said,JSON),--json)

compare: install ## two runs side by side: settings, results, and their curves in one picture: make compare A=name B=name [PLOT=file.png] [JSON=1]
	@$(if $(and $(call said,A),$(call said,B)),,$(error A or B is missing: say which runs, as make compare A=night B=night-2; make runs lists them))
	@$(LEASH) compare $(if $(call said,DIR),--dir $(DIR)) $(if $(call said,PLOT),--plot '$(PLOT)') $(if $(call said,JSON),--json) $(call said,A) $(call said,B)

page: install ## a page of a run for the browser: verdict, curves, samples, staleness bound [RUN=name] [PORT=8400] [HOST=127.0.0.1]
	@$(LEASH) page $(RUN_FLAG) $(if $(call said,PORT),--port $(PORT)) $(if $(call said,HOST),--host '$(HOST)')

stop: install ## stop a run from another shell (RUN=name; default: the newest)
	@$(LEASH) stop $(RUN_FLAG)

report: install ## rewrite summary, plots and result of a run from its files (RUN=name; default: the newest)
	@$(LEASH) report $(RUN_FLAG)

export: install ## write the model of a checkpoint for transformers: make export [STEP=number|best] [TO=folder] [RUN=name]
	@$(LEASH) export $(RUN_FLAG) $(if $(call said,STEP),--step $(STEP)) $(if $(call said,TO),--to '$(TO)')

groups: install ## the recorded groups to a file, or of the best episodes the conversations: make groups TO=file.parquet|.jsonl [BEST=n] [MIN_REWARD=x] [RUN=name]
	@$(if $(call said,TO),,$(error TO is missing: say which file to write, as make groups TO=groups.parquet))
	@$(LEASH) groups $(RUN_FLAG) $(if $(call said,BEST),--best $(BEST)) $(if $(call said,MIN_REWARD),--min-reward $(MIN_REWARD)) $(if $(call said,TO),'$(TO)')

tune: install ## change a running job: make tune MAX_STALENESS=2 [ARGS="rollout.tail=postpone ..."] [RUN=name]
	@$(LEASH) tune $(RUN_FLAG) $(if $(call said,MAX_STALENESS),buffer.max_staleness=$(MAX_STALENESS)) $(call said,ARGS)

scale: install ## change the number of engines of a running job: make scale ROLLOUT=3 [RUN=name]
	@$(if $(call said,ROLLOUT),,$(error ROLLOUT is missing: say how many engines, as make scale ROLLOUT=3))
	@$(LEASH) tune $(RUN_FLAG) rollout.num_engines=$(call said,ROLLOUT)

pause: install ## no group begins and no step is taken, until make unpause (RUN=name; default: the newest)
	@$(LEASH) tune $(RUN_FLAG) buffer.paused=true

unpause: install ## let a paused run go on (RUN=name; default: the newest)
	@$(LEASH) tune $(RUN_FLAG) buffer.paused=false

timeline: install ## draw how a version reached the engines: make timeline [VERSION=...] [RUN=name]
	@$(LEASH) timeline $(RUN_FLAG) $(if $(call said,VERSION),--version $(VERSION))

stacks: install ## write the stacks of all processes of a run on this machine into its folder (RUN=name; default: the newest)
	@$(LEASH) stacks $(RUN_FLAG)

depth: install ## what the buffer holds, in one line; WATCH=1 redraws it, JSON=1 prints an object [RUN=name]
	@$(LEASH) depth $(BUFFER_FLAG) $(if $(call said,WATCH),--watch) $(if $(call said,JSON),--json)

trace: install ## the life of one group: make trace GROUP=id [JSON=1] [RUN=name]
	@$(if $(call said,GROUP),,$(error GROUP is missing: say which, as make trace GROUP=id; make show prints the last one's))
	@$(LEASH) trace $(BUFFER_FLAG) $(if $(call said,JSON),--json) $(if $(call said,GROUP),'$(GROUP)')

show: install ## the text of a group, token by token: make show [GROUP=id] [RUN=name] (default: the last one recorded)
	@$(LEASH) show $(BUFFER_FLAG) $(if $(call said,GROUP),'$(GROUP)')

quarantine: install ## groups that are kept but not trained [RELEASE=id or DISCARD=id] [RUN=name]
	@$(LEASH) quarantine $(BUFFER_FLAG) $(if $(call said,RELEASE),--release '$(RELEASE)') $(if $(call said,DISCARD),--discard '$(DISCARD)')

buffer-dump: install ## write the buffer's groups to a file: make buffer-dump FILE=path [RUN=name]
	@$(if $(call said,FILE),,$(error FILE is missing: say which to write, as make buffer-dump FILE=groups.dump))
	@$(LEASH) buffer-dump $(BUFFER_FLAG) $(if $(call said,FILE),'$(FILE)')

buffer-load: install ## read them from a file: make buffer-load FILE=path [RUN=name]
	@$(if $(call said,FILE),,$(error FILE is missing: say which to read, as make buffer-load FILE=groups.dump))
	@$(LEASH) buffer-load $(BUFFER_FLAG) $(if $(call said,FILE),'$(FILE)')

# Files stay whole in a worker (tests/conftest.py). More workers than the two cores of the machine: about half of
# the time of tests is waiting.
UNIT := tests/unit -n 4
SERVERS := tests --ignore=tests/unit -n 3
# Of the others nothing is imported.
LONG = $$(grep -rl --include='test_*.py' 'mark\.long' tests) -n 3
# What measures time never runs beside another test.
MACHINE = $$(grep -rl --include='test_*.py' 'mark\.machine' tests) -m "machine and $(1)"
# They start hundreds of processes: without compiled files each would compile the project anew.
test-unit test-machine test-servers test-long: export PYTHONDONTWRITEBYTECODE :=
# The workers fill the cores: torch's threads in each of them would only wait for one another.
test-unit test-servers test-long: export OMP_NUM_THREADS := 1
# Seconds by file, in reports/.
TIMES := --junit-xml=reports

test: test-unit test-machine test-servers ## does it work? Every guarantee that a change can break (CONTRIBUTING.md)

test-unit: install ## of `make test`: the unit tests
	@$(PYTHON_BIN) -m pytest $(UNIT) -m "not machine and not long" $(TIMES)/unit.xml

test-machine: install ## of `make test`: what measures time, one test after the other
	@$(PYTHON_BIN) -m pytest $(call MACHINE,not long) $(TIMES)/machine.xml

test-servers: install ## of `make test`: launches and real servers
	@$(PYTHON_BIN) -m pytest $(SERVERS) -m "not machine and not long" $(TIMES)/servers.xml

test-long: install install-verifiers ## the rest: more kills, two hosts, verifiers, benchmarks in short, `make try`
	@$(PYTHON_BIN) -m pytest $(LONG) -m "long and not machine" $(TIMES)/long.xml
	@$(PYTHON_BIN) -m pytest $(call MACHINE,long) $(TIMES)/long-machine.xml

test-fast: install ## the fast unit tests
	@$(PYTHON_BIN) -m pytest $(UNIT) -m "not slow and not machine and not long"

test-times: ## seconds by file of the last tests: make test-times [ARGS=older-reports]
	@$(PYTHON_BIN) -m tests.support.times reports $(call said,ARGS)

# Full size; CI runs the same tests at small size (`make test-long`). Override sizes: make soak SOAK="MINUTES=1"
LENGTH_SIZES := LENGTH_PROMPTS=384 ALL_POLICIES=1 RESUMES=10 RESUME_STEPS=13
SOAK_SIZES := SIGNALS=12 GROUPS=100000 KILLS=200 SERVER_KILLS=30 KILLS_PER_POINT=50 LOSSY_GROUPS=20000 \
	SEQUENCES=10000 FUZZ=1000000 MINUTES=30 WEIGHT_FAULTS=20 ROLLOUT_KILLS=20 CHECKPOINT_KILLS=20 ADAPTER_VERSIONS=500 $(LENGTH_SIZES) $(SOAK)
SOAK_TESTS := tests/soak tests/unit/buffer/test_model.py tests/unit/buffer/wire/test_codec_fuzz.py \
	tests/unit/trainer_pool/test_zero3_training.py tests/integration/test_launch.py \
	tests/integration/test_adapter_versions.py

soak: install ## the long form of tests that CI runs briefly (hours): kills, fuzzing, signals, 30 minutes at full rate
	@env $(addprefix LEASH_SOAK_,$(SOAK_SIZES)) $(PYTHON_BIN) -m pytest $(SOAK_TESTS) --timeout 0 -s \
		-k "not launch or at_a_line"

soak-lengths: install ## the same of trained lengths alone (15 minutes): every policy, ten resumes; prints a table
	@env $(addprefix LEASH_SOAK_,$(LENGTH_SIZES) $(SOAK)) $(PYTHON_BIN) -m pytest tests/soak/test_trained_lengths.py --timeout 0 -s

HOST_SIZES := CUT_S=60

soak-hosts: install ## a run over three machines (network namespaces, needs root): one is cut off for a minute, slow, then dead; and by the launchers of CLUSTER=ssh and slurm (15 minutes)
	@env $(addprefix LEASH_SOAK_,$(HOST_SIZES) $(SOAK)) $(PYTHON_BIN) -m pytest tests/soak/test_three_hosts.py tests/soak/test_cluster_launchers.py --timeout 0 -s

soak-healthy: install ## a quickstart with two engines, in which `make status` may give no alarm (MINUTES=30)
	@env LEASH_SOAK_HEALTHY_MINUTES=$(or $(call said,MINUTES),30) $(PYTHON_BIN) -m pytest tests/soak/test_chaos.py --timeout 0 -s -k healthy

soak-faults: install ## twelve faults planted into real runs, one after the other: when does `make status` name each? (FAULTS="Redis,disk": these; HEALTHY_S=130 seconds without one before each)
	@env LEASH_SOAK_HEALTHY_S=$(or $(call said,HEALTHY_S),130) LEASH_SOAK_FAULTS_ONLY='$(call said,FAULTS)' \
		$(PYTHON_BIN) -m pytest tests/soak/test_planted_faults.py --timeout 0 -s

# CHAOS_SEED repeats a schedule, CHAOS_STEPS sets the length of the run, CHAOS_ONLY="SIGKILL,disk" leaves kinds out.

chaos: install ## a quickstart that is hit by CHAOS_FAULTS=100 faults of every kind, against an undisturbed one (most of an hour)
	@env LEASH_SOAK_CHAOS_FAULTS=$(CHAOS_FAULTS) $(if $(CHAOS_SEED),LEASH_SOAK_SEED=$(CHAOS_SEED)) \
		$(if $(CHAOS_STEPS),LEASH_SOAK_CHAOS_STEPS=$(CHAOS_STEPS)) LEASH_SOAK_CHAOS_ONLY='$(CHAOS_ONLY)' \
		$(PYTHON_BIN) -m pytest tests/soak/test_chaos.py --timeout 0 -s

bench: install ## the buffer against a Ray queue, bare Redis and its own targets; the last line is RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.buffer $(call said,ARGS)

bench-weights: install ## the checkpoint engine against the wire and other ways to send weights; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.weight_sync $(call said,ARGS)

bench-rollout: install ## four ways to schedule rollouts on a real engine, and the pool's overhead; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.rollout $(call said,ARGS)

bench-checkpoint: install ## what a checkpoint costs training, against a bare copy and DeepSpeed's own; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.checkpoint $(call said,ARGS)

bench-long-rows: install ## memory and time of one long row, by what is computed again and by ranks (ARGS="--tokens 131072"); last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.long_rows $(call said,ARGS)

bench-packing: install ## tokens/s of a step: padded, packed, shared prefixes (ARGS="--prompts gsm8k.jsonl"); last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.packing $(call said,ARGS)

bench-staleness: install ## accuracy by algorithm and max_staleness, on the quickstart (an hour; goes on where it was stopped)
	@$(PYTHON_BIN) -m benchmarks.loops.staleness $(call said,ARGS)

bench-parity: build/parity/verl ## our losses, corrections and advantages against those of TRL, verl and OpenRLHF; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.algorithms.parity --rivals build/parity

bench-e2e: build/parity/verl ## the same training by this project and by TRL: seconds, tokens/s, what was learnt; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.loops.end_to_end $(call said,ARGS)

bench-learning: install ## reward over time and trained tokens, by the rule that schedules rollouts (half an hour; goes on where it was stopped)
	@$(PYTHON_BIN) -m benchmarks.loops.learning $(call said,ARGS)

build/parity/verl: | install # the other systems, beside ours; what is installed here comes first
	@$(PYTHON_BIN) -m pip --version >/dev/null 2>&1 || $(PYTHON_BIN) -m ensurepip -q
	@$(PYTHON_BIN) -m pip install -q --no-deps --target build/parity -r benchmarks/algorithms/parity-requirements.txt

bench-models: install ## a launch for each type of model: engine against trainer (ARGS="gemma3 olmo2": these types); last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.models $(call said,ARGS)

bench-routing: install ## log-probabilities of engine and trainer with and without the engine's experts; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.routing $(call said,ARGS)

bench-head: install ## the tiled output head against full logits: memory and time; last line RESULT {json}
	@$(PYTHON_BIN) -m benchmarks.training.head $(call said,ARGS)

lint: install ## ruff, and formatting
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

format: install ## rewrite formatting
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

typecheck: install ## mypy, strict
	@.venv/bin/mypy

docs: install ## rewrite docs/configuration.md from the schema, docs/metrics.md and the dashboard from the catalogue
	@$(PYTHON_BIN) -m configs.reference
	@$(PYTHON_BIN) -m controller.metrics.reference
	@$(PYTHON_BIN) -m controller.metrics.dashboard

clean: ## remove the environments and caches; runs/ stays
	@rm -rf .venv .venv-verifiers .mypy_cache .ruff_cache .pytest_cache *.egg-info
