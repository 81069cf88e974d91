/* Operations of a decoding pass on a CPU with AVX-512 or AVX2, in fp32 and for few tokens: linear layers, attention,
 * smaller operations of a layer, and operations between forwards. Each function takes the address of its request. */
#include "vectors.h"
#include "blocks.h"
#include "dots.h"

#include <float.h>

#include "../threads.h"

enum { MOST_GATED = 64 }; /* most rows of ``gated`` */

#include "tasks.h"

#include "attention.h"
#include "exact.h"
#include "layers.h"
#include "linear.h"
#include "prefill.h"
#include "decoder.h"
#include "noise.h"
#include "../step/grow.h"
#include "../step/select.h"
#include "../step/slots.h"
#include "../step/traversal.h"
#include "replay.h"
