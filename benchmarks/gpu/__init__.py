"""What pipeinfer does on a GPU that can be had for minutes: one command, one JSON.

    bash benchmarks/gpu/run.sh --out FOLDER     # FOLDER/gpu.json
    python -m benchmarks.gpu pack               # .gpu/, to be copied to a machine without a network
    bash benchmarks/gpu/run.sh --out FOLDER --device rpc     # the rehearsal, on any machine
"""
