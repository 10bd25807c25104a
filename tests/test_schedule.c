/* The tests of schedule.h, which are compiled with the implementation. */
#include "hooks.h"

int main(int argc, char **argv) {
    return hook_schedule(argc, argv);
}
