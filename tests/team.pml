/* How the threads of a failed pass stop (ra__talk_part of ringattn.h), for Spin. Threads enter
 * ra_step, compute on memory of other ranks unless they see the failure, and leave; one waits in the
 * transport without being inside, and may be the one that fails. The last to leave, and the one that
 * waited, announce that this rank reads nothing of others any more.
 *
 * Checked: when that is announced no thread computes, and when all have ended after a failure it has
 * been announced. -DBREAK_ORDER looks for threads inside before it looks for a failure. */
#define STEPS 2                        /* of each thread */

bool failed, comm, parted;
byte inside, computing;

inline part() {
#ifdef BREAK_ORDER
    if :: inside == 0 -> if :: failed -> goto take :: else -> goto out fi :: else -> goto out fi;
#else
    if :: failed -> if :: inside == 0 -> goto take :: else -> goto out fi :: else -> goto out fi;
#endif
take:
    atomic { if :: !comm -> comm = true :: else -> goto out fi };
    if :: !parted -> assert(computing == 0) :: else -> skip fi;
    parted = true;
    comm = false;
out:
    skip
}

proctype stepper() {
    byte n;
    bool last;
again:
    last = false;
    inside++;
    if
    :: failed -> skip
    :: else ->
        computing++;
        if :: failed = true :: skip fi;
        computing--
    fi;
    atomic { inside--; last = inside == 0 };
    if :: last -> part() :: else -> skip fi;
    n++;
    if :: n < STEPS -> goto again :: else -> skip fi
}

proctype waiter() {
    atomic { if :: !comm -> comm = true :: else -> goto end fi };
    if :: failed = true :: skip fi;
    comm = false;
    part();
end:
    skip
}

init {
    atomic { run stepper(); run stepper(); run waiter() };
    _nr_pr == 1;
    assert(!failed || parted)
}
