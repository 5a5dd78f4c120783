#!/bin/sh
# One short run on a GPU: tokens/s and MFU of the recipe `base` in bfloat16, then decoding. About five minutes.
# Written without a GPU at hand and not run yet: the numbers are whatever your machine shows.
#     sh benchmarks/gpu.sh FOLDER_OF_TEXT [OUTPUT_FOLDER]
set -eu
text=${1:?usage: sh benchmarks/gpu.sh FOLDER_OF_TEXT [OUTPUT_FOLDER]}
out=${2:-out/gpu}
python -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; print(torch.cuda.get_device_name())"
for compiled in false true; do
    # 60 steps of 32 rows: the first ones warm up (and compile); the lines at the end show steady tokens/s and MFU.
    tercet train base --restart \
        --set "data.path=$text" --set "output_dir=$out/compile-$compiled" \
        --set training.device=cuda --set training.precision=bfloat16 --set "training.compile=$compiled" \
        --set training.num_steps=60 --set training.global_batch_size=32 --set training.log_every=10 \
        --set training.evaluate_every=60 --set training.save_every=60 --set optimizer.warmup_steps=5
    tail -n 3 "$out/compile-$compiled/metrics.jsonl"
done
tercet generate "$out/compile-false" "The" --max-new-tokens 256
