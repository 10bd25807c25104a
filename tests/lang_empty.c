/* Nothing but the header: matrix.sh looks at the symbols of this object. */
#include "ringattn.h"
