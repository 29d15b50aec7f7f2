"""What pipeinfer does on a GPU that can be had for minutes: one command, one JSON.

    python -m benchmarks.gpu prepare            # without a GPU: .gpu/, what the command needs there
    bash benchmarks/gpu/run.sh --out FOLDER     # on the machine with the GPU: FOLDER/gpu.json
    bash benchmarks/gpu/run.sh --out FOLDER --device rpc     # the rehearsal, on any machine
"""
