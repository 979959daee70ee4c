/* front.h - what is in front of the engine, made once and kept: the demo's tokenizer and base model
 * behind the real router, and unit/fake_engine.c, which answers on the calling thread. Threads: see
 * fake_engine.c. */
#ifndef BITDELTA_TESTS_FUZZ_FRONT_H
#define BITDELTA_TESTS_FUZZ_FRONT_H

#include "bitdelta/router/router.h"

bd_router *fuzz_router(void);

#endif
