#!/bin/sh
# mpi.sh RING_TRAIN FOLDER COMMAND: 50 steps on one rank, and the same by COMMAND, which starts 4 ranks
# under mpirun, on three meshes: the checkpoints have the same bytes.
set -e
mkdir -p "$2"
options='--steps 50 --tokens 4096 --layers 1 --hidden 32 --heads 2 --kv-heads 1 --feed 48 --groups 4 --quiet'
rm -f "$2"/*
$1 ringattn.h --out "$2/one" --ranks 1 $options
for mesh in 1x4 2x2 4x1; do
    $3 ringattn.h --out "$2/$mesh" --mesh $mesh $options
    cmp "$2/one.a.state" "$2/$mesh.a.state"
done
