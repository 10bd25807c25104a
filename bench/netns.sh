#!/bin/sh
# Rings between network namespaces of this machine, which are joined by links of a limited rate: how
# much of the transfer is hidden behind computing, what happens when a link is cut, and the
# conformance suite over links that are slow, late and lose frames. Needs root, ip and tc
# (iproute2). Leaves nothing behind.
#
#   netns.sh DIR [short]                 DIR: where the programs are built
#   ONLY="2 --transport tcp" netns.sh DIR    one row of the table, as the calls of row below name it
# Prints a table, then "N passed, N failed, N skipped". What is counted is that rings end as they
# should; how much they hide is for the reader.

dir=$1
mode=$2
mkdir -p "$dir" || exit 1
root=$(cd "$(dirname "$0")/.." && pwd)
id=ra$$
passed=0 failed=0 skipped=0

skip() {
    echo "skipped: $1 ($2)"
    skipped=$((skipped + 1))
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
    exit
}

hub_pid=''
clean() {
    [ -z "$hub_pid" ] || kill "$hub_pid" 2> /dev/null
    for r in 0 1 2 3 late0 late1 late2; do
        ip netns pids $id.$r 2> /dev/null | xargs -r kill -9 2> /dev/null
        ip netns del $id.$r 2> /dev/null
    done
    ip netns del $id.hub 2> /dev/null
}

if ! ip netns add $id.hub 2> "$dir/ip.log"; then
    skip "network namespaces" "$(tail -n 1 "$dir/ip.log")"
    finish
fi
trap clean EXIT
trap 'exit 1' INT TERM

# A bridge in a namespace of its own, and one link from it to each rank.
hub="ip -n $id.hub"
$hub link add bridge type bridge && $hub link set bridge up || exit 1
for r in 0 1 2 3; do
    ip netns add $id.$r
    ip -n $id.$r link set lo up
    $hub link add port$r type veth peer name eth0 netns $id.$r
    $hub link set port$r master bridge
    $hub link set port$r up
    ip -n $id.$r addr add 10.77.0.1$r/24 dev eth0
    ip -n $id.$r link set eth0 up || exit 1
done

# rate BITS: of each rank's link, each way; 0: as fast as it is.
rate() {
    for r in 0 1 2 3; do
        for end in "ip netns exec $id.$r tc qdisc:eth0" "ip netns exec $id.hub tc qdisc:port$r"; do
            ${end%%:*} del dev "${end##*:}" root 2> /dev/null
            [ "$1" = 0 ] || ${end%%:*} add dev "${end##*:}" root tbf rate "${1}bit" burst 128kb \
                limit 8mb || return 1
        done
    done
}

# Starts a command on another host, as rsh does, for mpirun: in the namespace of that address, with
# a name of its own, so that an MPI does not take the hosts for one.
cat > "$dir/agent" << END
#!/bin/sh
r=\${1##*.1}
shift
exec ip netns exec $id.\$r unshare -u sh -c "hostname ra\$r; \$*"
END
chmod +x "$dir/agent"

# mpi_ring PROGRAM RANKS --mpi openmpi|mpich ARGUMENTS...: over TCP between the namespaces. Messages
# of all lengths are sent at once: a receiver's consent to a long one would stand behind the bulk of
# data that goes the same way, and each direction would wait for the other.
mpi_ring() {
    program=$1 ranks=$2 mpi=$4 hosts=10.77.0.10
    shift 4
    for r in $(seq 1 $((ranks - 1))); do hosts="$hosts,10.77.0.1$r"; done
    if [ "$mpi" = openmpi ]; then
        set -- --allow-run-as-root --host "$hosts" --map-by node --bind-to none \
            --mca plm_rsh_agent "$dir/agent" --mca pml ob1 --mca btl tcp,self \
            --mca btl_tcp_eager_limit 4194304 \
            --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
            -n "$ranks" "$program" "$@"
    else
        set -- -launcher rsh -launcher-exec "$dir/agent" -hosts "$hosts" -ppn 1 -iface eth0 \
            -genv UCX_TLS tcp,self -genv UCX_RNDV_THRESH inf \
            -genv UCX_NET_DEVICES eth0 \
            -n "$ranks" "$program" "$@"
    fi
    timeout -k 5 120 ip netns exec $id.0 unshare -u sh -c 'hostname ra0; exec "$@"' sh \
        mpirun.$mpi "$@" > "$dir/out.0" 2> "$dir/err.0" < /dev/null
    status=$?
    sed "s/^mpi    /$(printf %-7s "$mpi")/" "$dir/out.0" > "$dir/line"
    return $status
}

# ring PROGRAM RANKS ARGUMENTS...: rank 0 prints its line to $dir/line.
ring() {
    [ "$3" != --mpi ] || { mpi_ring "$@"; return; }
    program=$1 ranks=$2 all='' pids='' bad=0
    shift 2
    port=$((20000 + ($$ + passed + failed * 7 + port_step) % 20000))
    port_step=$((port_step + 13))
    for r in $(seq 0 $((ranks - 1))); do all="$all 10.77.0.1$r:$port"; done
    for r in $(seq 0 $((ranks - 1))); do
        timeout -k 5 120 ip netns exec $id.$r "$program" --rank $r "$@" $all \
            > "$dir/out.$r" 2> "$dir/err.$r" &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
    cp "$dir/out.0" "$dir/line"
    return $bad
}
port_step=0

# built PROGRAM: bench/overlap.c on its transport, compiled when the first row needs it.
built() {
    [ ! -x "$1" ] || return 0
    case ${1##*/} in
        overlap) $cc -o "$1" "$root/bench/overlap.c" -lm ;;
        overlap_ofi) $cc -DOVERLAP_OFI -o "$1" "$root/bench/overlap.c" -lfabric -lm ;;
        *) "mpicc.${1##*_}" -std=c99 -O2 -pthread -I"$root" -DOVERLAP_MPI -o "$1" \
            "$root/bench/overlap.c" -lm ;;
    esac
}

# A row of the table: without a limit, for the time of computing, C; then with the rate at which the
# messages should take as long, corrected once by the time that they take with it.
row() {
    [ -z "$ONLY" ] || [ "$ONLY" = "${*#* }" ] || return
    built "$1" || exit 1
    what="$2 ranks $3 $4 $5 $6" limit=0 C=0
    for passes in 11 5 15; do
        rate "$limit" || { skip "$what" "tc has no tbf"; return; }
        if ! ring "$@" --passes $passes; then
            echo "FAIL $what: $(cat "$dir"/err.* | head -n 2)"
            failed=$((failed + 1))
            rate 0
            return
        fi
        [ $passes != 11 ] || C=$(awk '{ print $(NF - 1) }' "$dir/line")
        limit=$(awk -v limit="$limit" -v C="$C" \
            '{ printf "%.0f", limit ? limit * $(NF - 2) / C : $NF * 8 / C }' "$dir/line")
    done
    rate 0
    sed 's/   [0-9.]* [0-9.]* [0-9]*$//' "$dir/line"
    passed=$((passed + 1))
}

# More ranks than processors: see --model in bench/overlap.c.
modelled() {
    row "$@" --model
    [ "$mode" = short ] || row "$@" --model --full
    [ "$mode" = short ] || row "$@" --model --rounds
}

cc="${CC:-gcc} -std=c99 -O2 -pthread -I$root"
rm -f "$dir"/overlap*
line="%-9s %6s %-6s %-5s %9s %9s %9s %10s %9s %6s %9s %9s\n"
printf "$line" '' '' '' '' '' '' '(ms)' '' '' '' processor 'time of'
printf "$line" transport ranks mask by compute transfer pass hidden predicted ratio pass transfer
for transport in tcp helper inline; do
    row "$dir/overlap" 2 --transport $transport
    [ "$mode" = short ] || row "$dir/overlap" 2 --transport $transport --full
done
row "$dir/overlap" 2 --transport tcp --rounds
[ "$(nproc)" -lt 4 ] || row "$dir/overlap" 4 --transport tcp
for transport in tcp helper; do modelled "$dir/overlap" 4 --transport $transport; done
if [ -f /usr/include/rdma/fabric.h ]; then
    row "$dir/overlap_ofi" 2 --transport ofi
    [ "$mode" = short ] || row "$dir/overlap_ofi" 2 --transport ofi --full
    modelled "$dir/overlap_ofi" 4 --transport ofi
else
    skip ofi "no libfabric-dev"
fi
for mpi in openmpi mpich; do
    [ "$mode" != short ] || break
    if ! command -v mpicc.$mpi > /dev/null || ! command -v mpirun.$mpi > /dev/null; then
        skip $mpi "no mpirun.$mpi"
        continue
    fi
    row "$dir/overlap_$mpi" 2 --mpi $mpi
    row "$dir/overlap_$mpi" 2 --mpi $mpi --full
    modelled "$dir/overlap_$mpi" 4 --mpi $mpi
done

[ -z "$ONLY" ] || finish

# A link goes down in the middle of a pass: both ranks end soon after their deadline and say why.
rate 2000000
for transport in tcp helper; do
    begin=$(date +%s)
    { sleep 3; $hub link set port1 down; } &
    ring "$dir/overlap" 2 --transport $transport --seconds 6 --tokens 16384
    status=$?
    $hub link set port1 up
    took=$(($(date +%s) - begin))
    if [ $status != 0 ] && [ $took -le 20 ] && grep -q 'rank 0' "$dir/err.0" &&
        grep -q 'rank 1' "$dir/err.1"; then
        echo "link cut, $transport: both ranks ended after $took s; $(head -n 1 "$dir/err.0")"
        passed=$((passed + 1))
    else
        echo "FAIL link cut, $transport: exit $status after $took s: $(cat "$dir"/err.*)"
        failed=$((failed + 1))
    fi
done
rate 0

# conform WHAT ARGUMENTS...: the conformance suite, each rank in a namespace of its own.
conform() {
    what=$1
    shift
    if timeout -k 5 200 "$dir/conform_netns" "$@" > "$dir/conform.log" 2>&1; then
        echo "$what: $(tail -n 1 "$dir/conform.log")"
        passed=$((passed + 1))
    else
        echo "FAIL $what: $(grep -A 1 '^FAIL' "$dir/conform.log" | head -n 4)"
        failed=$((failed + 1))
    fi
}

# bench/hub.c delays and loses frames, which kernels without netem cannot.
late() {
    "$dir/hub" "$@" $id.late0 $id.late1 $id.late2 > "$dir/hub.log" 2>&1 &
    hub_pid=$!
    for i in 1 2 3 4 5 6 7 8 9 10; do
        grep -q ready "$dir/hub.log" && break
        sleep 0.2
    done
    for r in 0 1 2; do
        ip -n $id.late$r link set eth0 mtu 9000 up || return 1
        ip -n $id.late$r addr add 10.77.1.1$r/24 dev eth0 || return 1
    done
}
$cc -o "$dir/hub" "$root/bench/hub.c" || exit 1
$cc -o "$dir/conform_netns" "$root/tests/conformance/conform_netns.c" -lm || exit 1
if [ "$mode" != short ]; then
    rate 100000000
    conform "100 Mbit/s" 21000 $id.0 10.77.0.10 $id.1 10.77.0.11 $id.2 10.77.0.12
    rate 0
fi
# The same on MPI, three processes in three namespaces.
for mpi in openmpi mpich; do
    [ "$mode" != short ] || break
    if ! command -v mpicc.$mpi > /dev/null || ! command -v mpirun.$mpi > /dev/null; then
        skip "conformance on $mpi" "no mpirun.$mpi"
        continue
    fi
    mpicc.$mpi -std=c99 -O1 -DRINGATTN_SCALAR -pthread -I"$root" -o "$dir/conform_$mpi" \
        "$root/tests/conformance/mpi_conform.c" "$root/tests/lang_impl.c" -lm || exit 1
    if mpi_ring "$dir/conform_$mpi" 3 --mpi $mpi "$dir/meeting.$$"; then
        echo "$mpi: $(tail -n 1 "$dir/out.0")"
        passed=$((passed + 1))
    else
        echo "FAIL $mpi: $(grep -A 1 '^FAIL' "$dir/out.0" | head -n 4)"
        failed=$((failed + 1))
    fi
    rm -f "$dir/meeting.$$"
done
for r in 0 1 2; do
    ip netns add $id.late$r
    ip -n $id.late$r link set lo up
done
what="200 Mbit/s, 2 ms, 1 % lost"
if late --rate 200e6 --delay 2000 --loss 1 2>> "$dir/hub.log"; then
    conform "$what" 22000 $id.late0 10.77.1.10 $id.late1 10.77.1.11 $id.late2 10.77.1.12
else
    skip "$what" "$(tail -n 1 "$dir/hub.log")"
fi
finish
