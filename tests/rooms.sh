#!/bin/sh
# Cuts ringattn.h at its banners into one file per room, for tools that refuse long files and for
# reviewers: NN-name.h. The parts in order are the header again.
#
#   rooms.sh DIR            DIR is made anew
root=$(cd "$(dirname "$0")/.." && pwd)
dir=$1
[ -n "$dir" ] || { echo "rooms.sh DIR" >&2; exit 1; }
rm -f "$dir"/[0-9][0-9]-*.h
mkdir -p "$dir" || exit 1
awk -v dir="$dir" '
    BEGIN { part = dir "/00-head.h" }
    /^\/\* =+ [A-Z]/ {
        room = $0
        sub(/^\/\* =+ /, "", room); sub(/ *\*\/$/, "", room)
        if (room ~ /^[A-Z][A-Z0-9]*( [A-Z][A-Z0-9]*)*$/) {
            gsub(/ /, "-", room)
            close(part)
            part = sprintf("%s/%02d-%s.h", dir, ++n, tolower(room))
        }
    }
    { print > part }
' "$root/ringattn.h" || exit 1
cat "$dir"/[0-9][0-9]-*.h | cmp -s - "$root/ringattn.h" || {
    echo "tests/rooms.sh:1: rooms: the parts in $dir are not the header" >&2
    exit 1
}
