/* The operations of a decoding pass on a CPU with AVX-512 or AVX2, in fp32, for few tokens: linear layers, attention
 * and the small operations between them. Each function takes the address of its request. */
#include "vectors.h"

#include <omp.h>

enum { MOST_GATED = 64 }; /* rows of ``gated`` */

#include "tasks.h"

#include "attention.h"
#include "exact.h"
#include "layers.h"
#include "linear.h"
#include "noise.h"
