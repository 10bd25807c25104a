/* The protocol of the bundled world (room SHM of ringattn.h) for Spin: P ranks in a ring, each
 * sends M messages to the next and receives M from the one before, over inboxes with a lock: a
 * pass, of which there are PASSES. At any moment any rank may be aborted by another thread, may
 * stop for ever (-DDEATHS), or may leave between two calls; with -DRESTS the last rank may also
 * stay between two passes for ever, and with -DLEAVES another thread may make rank 0 leave. With
 * -DRINGS two threads of rank 0 have a ring each, and each ring makes one of two passes. The rings
 * take turns: a pass that does not get the turn is refused as busy and begins again. tests/spin.sh
 * says how it is run.
 *
 * Modelled as they are: post (whoever comes second takes the op of the first out of the inbox,
 * under its lock, and copies after unlocking), poll and wait with settle and withdraw, abort,
 * purge, rest, part and quiesce, with every shared word read and written in the order of the
 * header. A turn ends when the seat has rested after a pass, or after quiesce. Left out: bytes, and
 * how a sleeper hears of an event, which is a counter that it compares: here it is a flag.
 *
 * From its first message of a pass to the end of the pass a rank uses memory of the others (their
 * addresses are what messages are), or until it has failed and parts.
 *
 * Checked: no buffer is copied from or to once its rank has parted, so not after quiesce either; no
 * rank uses memory of others while one is quiet after an abort; a message is copied once, in order,
 * and DONE only after its copy; no copy is left open; without deaths every rank comes to an end
 * whatever is aborted when, and with them too, by its deadline.
 *
 * With -DCOARSE what one rank does between two looks at words that others change without a lock is
 * one step (STEP), and a rank notifies in the step in which it changes what it notifies of. Nothing
 * is lost by that: gone and why only rise and open is only added to, so such a look may as well
 * come later; and a rank that is notified later than it could have seen the change looks once more
 * and finds nothing. Four ranks are explored in this way, two and three in both.
 *
 * Variables that nobody reads again are set to one value: states that differ in them alone are the
 * same state.
 *
 * BREAK_*: mistakes that the model must find. */
#ifndef P
#define P 2
#endif
#ifndef M
#define M 2
#endif
#ifndef PASSES
#define PASSES 1
#endif
#define NEXT(r) ((r + 1) % P)
#define PREV(r) ((r + P - 1) % P)
#define SEND 0
#define RECV 1
#define OP(src, kind) (2 * (src) + (kind))             /* of the flow from src to the next */

mtype = { IDLE, PENDING, DONE, FAILED, QUEUED, TAKEN, MOVED, WITHDRAWN };

mtype state[2 * P] = IDLE, report[2 * P] = QUEUED;
byte queue[P];                         /* by source: 0 empty, 1 + kind of the op in it */
bool lock[P];                          /* of the inbox of a rank */
byte open[P];
bool why[P], gone[P], quiet[P], dead[P], ended[P];
bool event[P];                         /* something has happened since the rank looked */
bool aborted;
byte gone_count, copies[P];
bool busy[P], uses[P + 1];             /* uses: by ring; the second of rank 0 is the last */
byte busy_count;                       /* wraps around with BREAK_COUNT */
bool freed;                            /* some rank is quiet after an abort: it frees its memory */

#ifdef RINGS
byte rings = 2;                        /* of rank 0 that have not ended */
bool turn;                             /* of rank 0 */
#endif

#define LOCK(r) atomic { !lock[r] -> lock[r] = true }
#define UNLOCK(r) lock[r] = false
#define FAILURE(r) (why[r] || aborted)
#define NOTIFY(r) event[r] = true

#ifdef COARSE
#define STEP atomic
#else
#define STEP
#endif

inline notify_all() {
    atomic { n = 0; do :: n < P -> NOTIFY(n); n++ :: else -> break od; n = 0 }
}

/* The caller has set its own why. */
inline do_abort() {
    STEP {
        atomic { if :: !aborted -> aborted = true; first = true :: else fi }
        if :: first -> first = false; notify_all() :: else fi
    }
}

/* A rank that begins to post: counted before it is marked, and both before it looks for an abort.
 * Only who makes another rank leave sees these two as two steps. */
#ifdef LEAVES
#define MARKS
#else
#define MARKS atomic
#endif

inline rise(who) {
    if
    :: !busy[who] ->
#ifdef BREAK_COUNT
        atomic { !busy[who] -> busy[who] = true };
        atomic { busy_count++; rested = true }
#else
        MARKS { busy_count++; atomic { busy[who] = true; rested = true } }
#endif
    :: else
    fi
}

inline rest(who) {
    MARKS {
        atomic { if :: busy[who] -> busy[who] = false; last = true :: else fi; uses[ring] = false };
        atomic { if :: last -> busy_count--; late = busy_count == 0 :: else fi }
    };
    if
    :: last ->
        last = false;
        if :: late -> late = aborted :: else fi;
        if :: late -> late = false; notify_all() :: else fi
    :: else
    fi
}

/* Posts the op of one kind of the flow from src, for rank me. What happens under a lock is one step
 * as far as only holders of the lock can see it. */
inline post(who, flow, side, other) {
    STEP {
        atomic {
            !lock[NEXT(flow)] -> lock[NEXT(flow)] = true;
            report[OP(flow, side)] = QUEUED
        };
        if
        :: atomic { why[who] -> state[OP(flow, side)] = FAILED; UNLOCK(NEXT(flow)) }
        :: else ->
            if
            :: atomic { gone[other] -> state[OP(flow, side)] = FAILED; UNLOCK(NEXT(flow)) }
            :: else ->
                if
                :: atomic { queue[flow] == 2 - side ->  /* the other side came first */
                    queue[flow] = 0;
                    report[OP(flow, 1 - side)] = TAKEN;
                    take = true;
                    UNLOCK(NEXT(flow)) }
                :: atomic { else ->
                    assert(queue[flow] == 0);
                    state[OP(flow, side)] = PENDING;
                    open[who]++;
                    queue[flow] = 1 + side;
                    UNLOCK(NEXT(flow)) }
                fi
            fi
        fi
    };
    if
    :: take ->
        take = false;
        STEP {
            atomic {
                assert(!quiet[flow] && !quiet[NEXT(flow)] && !gone[other]);
#ifndef LEAVES
                assert(!gone[who]);
#endif
                assert(state[OP(flow, 1 - side)] == PENDING);
                copies[flow]++;
                state[OP(flow, side)] = DONE
            };
            report[OP(flow, 1 - side)] = MOVED;
            open[other]--;
#ifndef BREAK_WAKE
            NOTIFY(other)
#else
            skip
#endif
        }
    :: else
    fi
}

/* Leaves the report in `got`, never TAKEN. */
inline withdraw(taker, from, part) {
    atomic {
        !lock[NEXT(from)] -> got = report[OP(from, part)];
        if
        :: got == QUEUED -> queue[from] = 0; open[taker]--
        :: else
        fi
    };
    if
    :: got == TAKEN -> atomic { report[OP(from, part)] != TAKEN; got = report[OP(from, part)] }
    :: else
    fi
}

inline settle(owner, way, half, partner, broken) {
    if
    :: state[OP(way, half)] == PENDING ->
        got = report[OP(way, half)];
        if
        :: broken ->
            if :: got == QUEUED || got == TAKEN -> withdraw(owner, way, half) :: else fi;
            state[OP(way, half)] = FAILED
        :: else ->
            if
            :: got == QUEUED && gone[partner] ->
                withdraw(owner, way, half);
                if :: got == QUEUED -> state[OP(way, half)] = FAILED :: else fi
            :: else
            fi;
            if
            :: got == MOVED -> assert(copies[way] > 0); state[OP(way, half)] = DONE
            :: else
            fi
        fi;
        got = 0
    :: else
    fi
}

/* The ops of rank r can be forgotten. */
inline clear(r) {
    state[OP(r, SEND)] = IDLE;
    state[OP(PREV(r), RECV)] = IDLE;
    report[OP(r, SEND)] = QUEUED;
    report[OP(PREV(r), RECV)] = QUEUED
}

inline purge_one(leaver, stream, end) {
    atomic {
        !lock[NEXT(stream)];
        if
        :: queue[stream] == 1 + end ->
            queue[stream] = 0; report[OP(stream, end)] = WITHDRAWN; open[leaver]--
        :: else
        fi
    }
}

inline part_last(who) {
    atomic { if :: !gone[who] -> gone[who] = true; first = true :: else fi };
    if
    :: first ->
        first = false;
        rest(who);
        atomic { gone_count++; late = gone_count == P || !aborted };
        if :: late -> late = false; notify_all() :: else fi
    :: else
    fi
}

/* Begins a pass: on rank 0 when no ring of it is in one. */
inline begin() {
#ifdef RINGS
    if
    :: me == 0 ->
        if
        :: atomic { !turn -> turn = true }
#ifdef BREAK_FAILED
        :: FAILURE(me)                 /* it will fail anyhow, so it need not wait */
#endif
        fi
    :: else
    fi
#else
    skip
#endif
}

inline end_turn() {
#ifdef RINGS
    if :: me == 0 -> turn = false :: else fi
#else
    skip
#endif
}

/* ring: me, or P for the second ring of rank 0. */
proctype rank(byte me; byte ring) {
    byte i, n;
#ifdef RINGS
    byte passes = (me == 0 -> 1 : PASSES);
#else
    byte passes = PASSES;
#endif
    byte pass;
    mtype got;
    bool failure, first, fails, late, take, last, rested;
#ifdef RESTS
    if :: me == P - 1 -> ended[me] = true; goto end_dead :: skip fi;
#endif
again:
    begin();
    do
    :: i < M && !fails ->
        rise(me);
        failure = FAILURE(me);
        if
        :: failure ->
            failure = false;
            fails = true;
            if :: rested -> rested = false; rest(me) :: else fi
        :: else ->
            rested = false;
            post(me, PREV(me), RECV, PREV(me));
            post(me, me, SEND, NEXT(me));
            do                         /* wait until both are through */
            :: state[OP(me, SEND)] == DONE && state[OP(PREV(me), RECV)] == DONE ->
                atomic {
                    i++;
                    assert(copies[PREV(me)] >= pass * M + i);
#ifdef LEAVES
                    uses[ring] = me > 0; /* whose rank is made to leave must see to that itself */
#else
                    uses[ring] = true;
#endif
                    assert(!freed || !uses[ring]);
                    clear(me)
                };
                break
            :: state[OP(me, SEND)] == FAILED || state[OP(PREV(me), RECV)] == FAILED ->
                fails = true;
                break
            :: else ->
                STEP {
                    event[me] = false;
                    failure = FAILURE(me);
                    settle(me, PREV(me), RECV, PREV(me), failure);
                    settle(me, me, SEND, NEXT(me), failure)
                };
                if
                :: failure -> failure = false; fails = true; break
                :: else
                fi;
                if                     /* sleeps, or its deadline comes: only if one is not there */
#ifdef RESTS
                :: ended[P - 1] -> fails = true; break
#endif
                :: event[me]
                :: state[OP(me, SEND)] != PENDING && state[OP(PREV(me), RECV)] != PENDING
                :: dead[NEXT(me)] || dead[PREV(me)] || (P > 3 && dead[NEXT(NEXT(me))]) ->
                    fails = true;
                    break
                fi
            od
        fi
    :: else -> break
#ifdef DEATHS
    :: i < M && !fails && me == P - 1 -> dead[me] = true; goto end_dead
#endif
    :: i < M && !fails && me == 0 -> break             /* leaves early */
    od;
    if
    :: i == M && !fails ->
#ifdef BREAK_TURN
        end_turn();
#endif
#ifndef BREAK_REST
        rest(me);
#endif
#ifndef BREAK_TURN
        end_turn();
#endif
        atomic {
            pass++;
            if
            :: pass < passes -> i = 0; goto again
#ifdef RESTS
            :: me == P - 1 -> ended[me] = true; goto end_dead
#endif
#ifdef RINGS
            :: pass == passes && me == 0 && rings == 2 -> rings--; goto end_dead
#endif
            :: else
            fi
        }
    :: else
    fi;
    if
    :: atomic { fails -> fails = false; why[me] = true }; do_abort()
    :: else
    fi;
    /* part: from here on this rank posts nothing, and hears of nothing */
    atomic { why[me] = true; event[me] = true; uses[ring] = false; i = 0 };
    STEP {
        purge_one(me, PREV(me), RECV);
        purge_one(me, me, SEND)
    };
#ifndef BREAK_COPIES
    open[me] == 0;
#endif
    STEP { part_last(me); clear(me) };
    /* quiesce: by its deadline if one died; one that leaves well need not */
    atomic {
        if
        :: gone_count == P -> quiet[me] = true
        :: aborted && busy_count == 0 -> quiet[me] = true; freed = true
        :: dead[P - 1]
#ifdef RESTS
        :: !aborted
#endif
        fi;
        do :: n <= P -> assert(!freed || !uses[n]); n++ :: else -> break od;
        n = 0;
        ended[me] = true
    };
    end_turn();
#ifdef RINGS
    if :: me == 0 -> rings-- :: else fi;
#endif
end_dead: skip
}

#ifdef LEAVES
proctype leaver(byte me; byte ring) {
    byte n;
    bool first, last, late;
    if
    :: why[me] = true; do_abort();
        STEP {
            purge_one(me, PREV(me), RECV);
            purge_one(me, me, SEND)
        };
        open[me] == 0;
        part_last(me)
    :: skip
    fi
}
#endif

/* Another thread of some rank, at some moment, or never. */
proctype aborter(byte me) {
    byte n;
    bool first;
    if :: why[me] = true; do_abort() :: skip fi
}

init {
    byte r;
    atomic {
        do :: r < P -> run rank(r, r); r++ :: else -> break od;
#ifdef RINGS
        run rank(0, P);
#endif
        run aborter(0);
#ifdef LEAVES
        run leaver(0, 0);
#endif
        r = 0
    }
    /* all have ended: nothing may be left */
    (_nr_pr == 1);
    do
    :: r < P ->
        assert(open[r] == 0 && (ended[r] || dead[r]));
        r++
    :: else -> break
    od
}
