"""Options of llama.cpp's tools, and of ik_llama.cpp's sweep-bench, that are not here or are not the same, and why. The parser
looks here for an option that its command does not know; docs/llama-cpp-users.md is written from these tables.

A row: why, the options, and the commands that it is of; without commands it is of all. The first row of a command counts.
"""
from collections.abc import Iterator

TOOLS = {"llama-cli": "run", "llama-completion": "run", "llama-perplexity": "perplexity", "llama-imatrix": "imatrix",
         "llama-bench": "bench", "llama-sweep-bench": "sweep-bench", "llama-quantize": "quantize"}
Row = tuple[str, str] | tuple[str, str, str]

# Switches for what is so anyway: taken, and nothing changes.
ALWAYS: list[Row] = [
    ("there is no empty run before", "--no-warmup", "run perplexity imatrix"),
    ("prompts are run once before they are timed", "-wb --warmup-batch", "sweep-bench"),
    ("a text ends where the context is full", "--no-context-shift"),
    ("templates are Jinja's, in its sandbox", "--jinja"),
    ("caches lie where their layer does", "-kvo --kv-offload"),
    ("weights come to a GPU for large micro-batches", "--op-offload"),
    ("weights are packed into tiles whenever they are loaded", "--repack"),
    ("graphs are used again; --no-graphs leaves that out", "-gr --graph-reuse"),
    ("a text is taken as it is", "--no-escape", "perplexity imatrix"),
    ("a prompt is not printed again", "--no-display-prompt", "run"),
    ("input is lines, in every terminal", "--simple-io", "run"),
    ("lines of the log have neither prefix nor time, and are text", "--no-log-prefix --no-log-timestamps --no-log-jsonl"),
    ("nothing is timed inside; a run ends with its speed", "--no-perf"),
    ("the perplexity is that of another command", "--no-ppl", "imatrix"),
    ("a terminal has a bar", "--progress", "bench"),
    ("an answer is a text; nothing is taken out of it", "--skip-chat-parsing", "run"),
    ("there are no projectors of images", "--no-mmproj --no-mmproj-auto --no-mmproj-offload", "run sweep-bench"),
    ("a draft is chosen as every token is", "--no-spec-draft-backend-sampling", "run"),
]

# Options that are refused.
ABSENT: list[Row] = [
    # of commands that generate nothing
    ("nothing is drawn here", "--samplers --sampler-seq --sampling-seq --temp --temperature --top-k --top-p --min-p --top-nsigma "
     "--top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --tfs --repeat-last-n --repeat-penalty "
     "--presence-penalty --frequency-penalty --penalize-nl --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n "
     "--dry-sequence-breaker --adaptive-target --adaptive-decay --adaptive-updt-w-cur --dynatemp-range --dynatemp-exp --mirostat "
     "--mirostat-lr --mirostat-ent --ignore-eos -l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file "
     "-bs --backend-sampling --banned-string-file --banned-n --allowlist-unicode-rule --allowlist-pieces --allowlist-keyword "
     "--allowlist-keyword-delay --expiring-logit-bias-file", "perplexity imatrix bench sweep-bench logits verify info quantize"),
    ("nothing is generated here", "-n --predict --n-predict --keep --ctx-checkpoints -r --reverse-prompt -sp --special -ptc "
     "--print-token-count --context-shift -md --model-draft -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd "
     "--cache-type-v-draft --spec-draft-type-v", "perplexity imatrix"),
    ("the text is that of -f", "-p --prompt -bf --binary-file", "perplexity imatrix"),
    ("tokens are random, and the tool does nothing with it either", "-p --prompt -f --file -bf --binary-file -e --escape "
     "--no-escape --in-file --prompt-cache --prompt-cache-all --prompt-cache-ro --keep -i --interactive -if --interactive-first "
     "-cnv --conversation -sp --special -r --reverse-prompt -mli --multiline-input --simple-io -co --color --verbose-prompt "
     "--no-display-prompt --in-prefix-bos --in-prefix --in-suffix --infill --spm-infill -ptc --print-token-count --chat-template "
     "--chat-template-file --chat-template-kwargs --peg --reasoning-format -rea --reasoning --reasoning-budget "
     "--reasoning-budget-message --reasoning-tokens -spf --system-prompt-file -ptcall --parallel-tool-calls --skip-chat-parsing "
     "--no-prefill-assistant --chunks --chunk --from-chunk --cfg-negative-prompt --cfg-negative-prompt-file --cfg-scale -gan "
     "--grp-attn-n -gaw --grp-attn-w -md --model-draft -td --threads-draft -tbd --threads-batch-draft -cd --ctx-size-draft -ngld "
     "--gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft -draft "
     "--draft-params --draft --draft-max --draft-n --draft-min --draft-n-min --draft-p-min -ps --p-split --spec-ckpt-mode "
     "--recurrent-ckpt-mode --spec-autotune --spec-stage --spec-type --spec-replace --spec-ngram-size-n --spec-ngram-size-m "
     "--spec-ngram-min-hits --suffix-pattern-len --suffix-max-depth --suffix-corpus -mtprot --mtp-requantize-output-tensor -mtp "
     "--multi-token-prediction -no-mtp --no-multi-token-prediction -lcs --lookup-cache-static -lcd --lookup-cache-dynamic "
     "--context-shift -np --parallel -ns --sequences -a --alias", "sweep-bench"),
    ("of another program, the tool reads it and does nothing with it", "--mmproj --mmproj-url --mtmd-kq-type --image --audio "
     "--image-min-tokens --image-max-tokens -tm --threads-mtmd --embedding --embeddings --embd-normalize --embd-output-format "
     "--embd-separator --pooling --attention -cb --cont-batching -nocb --no-cont-batching -dkvc --dump-kv-cache --host --port "
     "--send-done --path --webui --webui-mcp-proxy --ui-mcp-proxy --api-key --api-key-file --ssl-key-file --ssl-cert-file -to "
     "--timeout --threads-http --log-format --no-slots --metrics --slot-save-path --sql-save-file --sqlite-zstd-ext-file -sps "
     "--slot-prompt-similarity -pps -npp -ntg -npl --context-file --chunk-size --chunk-separator --junk -ctx-ckpt "
     "--ctx-checkpoints -ctx-ckpt-i --ctx-checkpoints-interval -ctx-ckpt-t --ctx-checkpoints-tolerance -ctx-ckpt-e "
     "--ctx-checkpoints-eviction -cram --cache-ram -crs --cache-ram-similarity -cram-n-min --cache-ram-n-min --pos --output "
     "--output-file --output-draft --draft-output --draft-output-file -ofreq --output-frequency --save-frequency "
     "--process-output --output-tensor-name --positive-file --negative-file --pca-batch --pca-iter --method --perplexity "
     "--all-logits --save-all-logits --kl-divergence-base --kl-divergence --ppl-stride --ppl-output-type --no-ppl --hellaswag "
     "--hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice --multiple-choice-tasks -dr --dry-run", "sweep-bench"),
    # of drawing tokens
    ("steps are in one order, that of docs/python.md, so that a seed gives one text", "--samplers --sampler-seq --sampling-seq",
     "run"),
    ("not among the steps; those there are, docs/python.md has: top-k, top-p, min-p, temperature, penalties, bias",
     "--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --dry-multiplier --dry-base "
     "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range "
     "--dynatemp-exp --mirostat --mirostat-lr --mirostat-ent", "run"),
    ("choices are made on the device where top_k is 1 to 64 and nothing changes the logits (bias, penalties, grammar), "
     "else by the host; the ids are the same", "-bs --backend-sampling --spec-draft-backend-sampling", "run"),
    # of texts and chats
    ("a text ends where the context is full: moved positions would be other arithmetic", "--context-shift --keep"),
    ("a text is taken as it is", "-e --escape", "perplexity imatrix"),
    ("there is no empty run before", "--warmup", "run perplexity"),
    ("-f takes a UTF-8 text", "-bf --binary-file", "run"),
    ("the text goes to stdout", "-o --output --output-file", "run"),
    ("control tokens are not text", "-sp --special", "run"),
    ("text is shown without colours", "-co --color", "run"),
    ("pasted lines stay together, and a line that ends in \\ goes on", "-mli --multiline-input", "run"),
    ("a run ends with the numbers of tokens, and --verbose tells more", "-ptc --print-token-count --verbose-prompt --perf"),
    ("the template says what is around a message", "--in-prefix --in-suffix --in-prefix-bos", "run"),
    ("templates are Jinja's; without --chat or -cnv a prompt is taken as it is", "--no-jinja", "run"),
    ("a model writes its thoughts as a part of its text, of any length; -rea off asks it not to think",
     "--reasoning-format --reasoning-budget --reasoning-budget-message --reasoning-preserve --no-reasoning-preserve "
     "--no-skip-chat-parsing", "run"),
    ("caches of prompts are not kept in files", "--prompt-cache --prompt-cache-all --prompt-cache-ro", "run"),
    ("positions are the tokens' own, as the model was trained", "-gan --grp-attn-n -gaw --grp-attn-w", "run"),
    ("text alone: there are no projectors of images or sound", "-mm --mmproj -mmu --mmproj-url --mmproj-auto --mmproj-offload "
     "-mmdev --mmproj-device --image --audio --video --image-min-tokens --image-max-tokens --video-fps "
     "--video-timestamp-interval --video-ffmpeg-dir"),
    ("there is no server behind a chat", "--server-base -ctxcp --ctx-checkpoints --swa-checkpoints -cram --cache-ram "
     "--log-prompts-dir", "run"),
    ("a model of the internet is asked for by its name", "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
     "--vision-gemma-12b-default"),
    # of drafts
    ("the draft model lies on the first device of -dev as a whole, with the threads of -t and the cache types of -ctk and -ctv",
     "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v -td --threads-draft "
     "--spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch -Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd "
     "--cpu-range-draft --spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict --prio-draft --spec-draft-prio "
     "--poll-draft --spec-draft-poll -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch --cpu-strict-batch-draft "
     "--spec-draft-cpu-strict-batch --prio-batch-draft --spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch -otd "
     "--override-tensor-draft --spec-draft-override-tensor -cmoed --cpu-moe-draft --spec-draft-cpu-moe -ncmoed --n-cpu-moe-draft "
     "--spec-draft-n-cpu-moe --spec-draft-ncmoe -devd --device-draft --spec-draft-device -ngld --gpu-layers-draft "
     "--n-gpu-layers-draft --spec-draft-ngl", "run"),
    ("drafts are as long as their chance to be right says, --draft-max at most", "--draft-min --draft-n-min --spec-draft-n-min "
     "--draft-p-split --spec-draft-p-split --spec-default", "run"),
    ("made-up rates of right drafts measure nothing", "--spec-synth-len --spec-synth-rates", "run"),
    ("--draft-source ngram looks for the longest repetition, without settings", "--spec-ngram-mod-n-min --spec-ngram-mod-n-max "
     "--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
     "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n "
     "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits", "run"),
    ("a draft model is a file: -md FILE", "-hfd -hfrd --hf-repo-draft --spec-draft-hf", "run"),
    # of models
    ("a model is a file, a name that pull knows, or one of a hub: -hf", "-mu --model-url -dr --docker-repo -cl --cache-list"),
    ("what a model is stands in its file alone, whose sha256 attestations have; gguf-py's gguf_set_metadata changes a file",
     "--override-kv -okv --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
     "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast"),
    ("adapters and control vectors are not part of any graph here", "--lora --lora-scaled --lora-init-without-apply "
     "--control-vector --control-vector-scaled --control-vector-layer-range"),
    ("a logit that is not a number is an error that names its token; gguf files are checked when they are opened",
     "--check-tensors -vq --validate-quants"),
    ("a file is read once, as a map or piece by piece (--no-mmap)", "-lzm --lazy-mode -thp --transparent-huge-pages"),
    # of memory and placement
    ("weights are packed into tiles whenever they are loaded", "-nr --no-repack"),
    ("weights are packed into tiles whenever they are loaded", "--repack", "bench"),
    ("packed weights are read where they lie", "--no-host"),
    ("--fit moves weights, never the size of the context", "-fitc --fit-ctx"),
    ("-b and -c say how many windows are decoded together", "-np --parallel -kvu --kv-unified -no-kvu --no-kv-unified"),
    ("layers with a window keep what they read; the others keep all", "--swa-full --swa-compress"),
    ("cells of the cache are never moved", "-dt --defrag-thold -mea --max-extra-alloc -wgt --worst-graph-tokens"),
    ("devices are those of one machine", "--rpc -rpc"),
    ("a cache has one type for K and one for V, in all layers", "-ictk --indexer-cache-type-k -ctk-first --cache-type-k-first "
     "-ctk-last --cache-type-k-last -ctv-first --cache-type-v-first -ctv-last --cache-type-v-last"),
    ("caches are stored as -ctk and -ctv say, without a rotation", "-khad --k-cache-hadamard -vhad --v-cache-hadamard"),
    ("-fitt says how much --fit leaves free", "--fit-margin -gfm --gpu-fit-margin"),
    ("-dev names the devices, CPU for none", "--max-gpu"),
    ("-sm column shares products, with the bits of one device", "-smgs --split-mode-graph-scheduling -sas --scheduler-async "
     "-smf16 --split-mode-f16 -smf32 --split-mode-f32 -grt --graph-reduce-type -gap --graph-attn-precision"),
    ("experts that are used come to their device: --offload, --hot-experts", "--defer-experts --prefetch-experts "
     "--prefetch-experts-threads -no-ooae --no-offload-only-active-experts"),
    ("ops have names here, not numbers, which would mean others in the next version: --offload NAME=N",
     "-op --offload-policy"),
    # of kernels and threads
    ("taskset, chrt and nice say it of every program", "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio -Cb --cpu-mask-batch "
     "-Crb --cpu-range-batch --cpu-strict-batch --prio-batch"),
    ("threads wait for work as long as they need to: kernels/threads.py", "--poll --poll-batch"),
    ("weights are packed into tiles whenever they are loaded", "-rtr --run-time-repack"),
    ("ops are fused wherever a device has a kernel for it; --no-fuse leaves out fusions by name", "-fmoe --fused-moe"),
    ("latent attention is one definition, that of the file", "-mla --mla-use -dsa --dsa -fidx --fused-indexer-topk -dsatk "
     "--dsa-top-k"),
    ("attention keeps no scores in memory", "-amb --attention-max-batch"),
    ("attention is one fused op on every device, whose arithmetic is part of the promise of equal bits",
     "-no-fa --no-flash-attn"),
    ("--no-fuse leaves out fusions by name", "-no-fmoe --no-fused-moe -no-fug --no-fused-up-gate -no-mmad "
     "--no-fused-mul-multiadd -mqkv --merge-qkv -muge --merge-up-gate-experts -rcache --rope-cache -ger --grouped-expert-routing "
     "-fdn --fused-delta-net -cuda --cuda-params"),
    ("--no-graphs launches every kernel by itself", "-no-gr --no-graph-reuse"),
    ("it leaves out experts, which is another model", "-ser --smart-expert-reduction"),
    # of measuring
    ("generation behind a prompt is -n with -d", "-gp"),
    ("a context gives logits here, not embeddings", "-embd --embeddings", "bench"),
    ("each row is measured once, every one is", "-nrep --n-repetitions --sweep-stride", "sweep-bench"),
    ("--verbose tells what memory is taken", "--sweep-memory", "sweep-bench"),
    ("the table is short already", "--minilog", "sweep-bench"),
    ("-v says more, -lv how much", "-ld --logdir", "sweep-bench"),
    # of matrices
    ("a matrix is of one text", "--in-file", "imatrix"),
    ("the matrix is written once, at the end", "-ofreq --output-frequency --save-frequency", "imatrix"),
    ("the perplexity is another command's", "--ppl", "imatrix"),
    ("a matrix is made here; quantize --imatrix says what is missing in it", "--show-statistics", "imatrix"),
    # of quantizing
    ("--tensor-type may be given again and again", "--tensor-type-file", "quantize"),
    ("a model without layers is another model", "--prune-layers", "quantize"),
    ("the new model is one file", "--keep-split", "quantize"),
    ("a matrix counts for all its tensors; --tensor-type names those that differ", "--include-weights --exclude-weights",
     "quantize"),
    ("a tensor is quantized in parts of a few MB", "--max-buffer-size", "quantize"),
    # older spellings
    ("-mmp 0 is --no-mmap", "-mmp", "bench"),
    ("-cnv is a chat, with the model's own template", "-ins --instruct -cml --chatml", "run"),
    # of the command line
    ("--help says it", "--usage"),
    ("the shell's own completion is not written", "--completion-bash"),
    ("what is told goes to stderr, as text: 2> FILE", "--log-file --log-disable --log-jsonl --log-colors --log-prefix "
     "--log-timestamps"),
]

# Options that are taken, and mean something else or more.
DIFFERENT: list[Row] = [
    ("2048 by default: it changes no bit, and prompts are faster", "-ub --ubatch-size", "run perplexity imatrix bench"),
    ("512 by default, as the tool's documentation has it; 0: what the model was trained for",
     "-c --ctx-size", "perplexity imatrix"),
    ("as long as prompt and new tokens by default, in a chat 4096; 0: what the model was trained for",
     "-c --ctx-size", "run"),
    ("8192 by default, or what the model was trained for; 0: that", "-c --ctx-size", "sweep-bench"),
    ("off is refused: attention is one fused op on every device, whose arithmetic is part of the promise of equal bits",
     "-fa --flash-attn"),
    ("f32, f16 and q8_0", "-ctk --cache-type-k -ctv --cache-type-v"),
    ("also a name: smollm2, which is the default", "-m --model"),
    ("one placement for all tests: see --device", "-ngl --n-gpu-layers -ncmoe --n-cpu-moe -sm --split-mode -mg --main-gpu -ts "
     "--tensor-split -ot --override-tensor", "bench"),
    ("a switch, without a value", "-nkvo --no-kv-offload -nopo --no-op-offload", "bench"),
    ("row is refused; tensor is column, which shares products by their rows and gives the same bits",
     "-sm --split-mode"),
    ("all by default, as far as --fit finds room", "-ngl --gpu-layers --n-gpu-layers"),
    ("dio is refused", "-lm --load-mode"),
    ("one number for all devices; on by default, and off with --fit off", "-fitt --fit-target"),
    ("a value, on or off", "--fit", "sweep-bench"),
    ("names are those of the file, read as Python's regular expressions; devices cpu, cuda:N, CPU, CUDA0",
     "-ot --override-tensor"),
    ("cpu, cuda:N, CPU, CUDA0", "-dev --device"),
    ("also the CPUs, and the names that -dev takes", "--list-devices"),
    ("all CPU threads by default", "-t --threads"),
    ("0 to 2 silence stderr but for errors and warnings, 4 and more are --verbose", "-lv --verbosity --log-verbosity"),
    ("describes model, memory plan, copies and kernels", "-v --verbose --log-verbose"),
    ("0 by default, never drawn: the same command gives the same text", "-s --seed", "run"),
    ("nothing is drawn, so it changes nothing", "-s --seed", "perplexity imatrix"),
    ("0 by default: the likeliest token", "--temp --temperature", "run"),
    ("128 by default, in a chat -1: until the model ends its text or the context is full; -2 is that too",
     "-n --predict --n-predict", "run"),
    ("also ID-BIAS,ID+BIAS; the bias of IDs that end a text may be given", "-l --logit-bias", "run"),
    ("off by default: a text is taken as it is", "-e --escape --no-escape", "run"),
    ("without --chat and -cnv the prompt is continued; stdin is read where neither -p nor -f is given",
     "-p --prompt -f --file", "run"),
    ("off by default but for a terminal and a model with a template, where neither -p nor -f is given; -i is the same",
     "-cnv --conversation -no-cnv --no-conversation -i --interactive -if --interactive-first", "run"),
    ("--chat is the same", "-st --single-turn", "run"),
    ("the answer ends there", "-r --reverse-prompt", "run"),
    ("Jinja source, or the name of one of the model's own templates", "--chat-template", "run"),
    ("enable_thinking of the template", "-rea --reasoning", "run"),
    ("reasoning_effort of the template", "--reasoning-effort", "run"),
    ("8 by default, tried as far as their chance to be right says", "--draft --draft-n --draft-max --spec-draft-n-max", "run"),
    ("none, draft-simple, draft-mtp, and ngram for all ngram-*; the others are refused", "--spec-type", "run"),
    ("a table of more columns; each test a row", "-o --output -oe --output-err", "bench"),
    ("the first column is the first token", "--ppl-output-type", "perplexity"),
    ("also with the file of tasks behind it", "--hellaswag --winogrande --multiple-choice", "perplexity"),
    ("gguf alone", "--output-format", "imatrix"),
    ("jsonl or md, the default", "--output-format", "sweep-bench"),
    ("imatrix.gguf has no default: a name must be given", "-o --output --output-file", "imatrix"),
    ("types of docs/quantize.md", "--output-tensor-type --token-embedding-type --tensor-type", "quantize"),
    ("on the CPU; a last line has the bytes", "--dry-run", "quantize"),
]


def rows_of(table: list[Row], command: str) -> Iterator[tuple[str, str]]:
    """(option, why) of a command."""
    for why, options, *commands in table:
        if not commands or command in commands[0].split():
            yield from ((option, why) for option in options.split())


def why(table: list[Row], command: str, option: str) -> str | None:
    """What the first row says; None: the table has no such option for this command."""
    return next((why for each, why in rows_of(table, command) if each == option), None)
