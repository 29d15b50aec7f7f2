/* llama.cpp's evaluation callback for the nodes of a graph that are not wanted.

   llama.cpp calls it for every node to find out whether the node is wanted; on a deep model these are
   thousands of calls per token. Only outputs of layers reach Python; partial results of sums go to
   sums.c. See layer_probe.py, whose struct Filter has the same fields. Loaded with ctypes: needs
   neither Python's nor llama.cpp's headers. */

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sums.h"

enum { NOTHING, LAST, SOME, ENDED };
enum { NO_EXPERTS, ALONE, SHARED };  /* see LayerProbe.experts */

struct filter {
    const char *(*name_of)(const void *tensor);           /* ggml_get_name */
    bool (*reached)(void *tensor, bool ask, void *data);  /* LayerProbe */
    const char *last;                                     /* name of the last layer's output */
    int wants;
    int stride;  /* SOME: the output of each so many layers, and the last */
    int sliced;  /* whether attn_output and ffn_down give parts that are to be summed up */
    int first;   /* the file's first layer in the model */
    size_t source;                                        /* where a tensor names its source */
    void *(*data_of)(const void *tensor);                 /* ggml_get_data */
    size_t (*bytes_of)(const void *tensor);               /* ggml_nbytes */
    struct sums *sums;                                    /* NULL: Python sums up */
    const char *entry;                                    /* name of what rows are put into */
    int enters;                                           /* whether this decode's are */
    int row_by_row;  /* whether routers' products are to be those of single rows */
    int64_t (*elements_of)(const void *tensor);           /* ggml_nelements */
    int64_t (*rows_of)(const void *tensor);               /* ggml_nrows */
    void (*dot)(int n, float *to, size_t, const float *x, size_t, const float *y, size_t, int);
    int experts;     /* which node is a slice's part of the sum over its experts */
};

size_t pipeinfer_filter_bytes(void)
{
    return sizeof(struct filter);
}

static bool ends(const char *text, const char *with)
{
    size_t length = strlen(text), own = strlen(with);
    return length >= own && strcmp(text + length - own, with) == 0;
}

/* A tensor's first or second source. */
static const void *source_of(const struct filter *filter, const char *tensor, int which)
{
    return ((void *const *)(tensor + filter->source))[which];
}

/* The name of the layer's tensor that a tensor is made of first, NULL where it is made of another:
   see weight_of in tensors.py. */
static const char *weight_of(const struct filter *filter, const char *tensor)
{
    const void *source = source_of(filter, tensor, 0);
    const char *name = source == NULL ? "" : filter->name_of(source);
    return strncmp(name, "blk.", 4) == 0 ? name : NULL;
}

/* See is_router in routers.py. */
static bool is_router(const struct filter *filter, const char *tensor)
{
    const char *name = weight_of(filter, tensor);
    return name != NULL
        && (ends(name, ".ffn_gate_inp.weight") || ends(name, ".ffn_gate_inp_shexp.weight"));
}

/* See by_rows in routers.py. */
static bool by_rows(const struct filter *filter, char *tensor)
{
    const void *weights = source_of(filter, tensor, 0), *inputs = source_of(filter, tensor, 1);
    const float *weight = filter->data_of(weights), *input = filter->data_of(inputs);
    float *to = filter->data_of(tensor);
    int64_t count = filter->rows_of(weights), rows = filter->rows_of(inputs), row, i;
    int64_t n = filter->elements_of(weights) / count;

    if (filter->bytes_of(inputs) != sizeof(float) * filter->elements_of(inputs))
        return false;  /* Python raises the error */
    for (row = 0; row < rows; row++)
        for (i = 0; i < count; i++)
            filter->dot((int)n, to + row * count + i, 0, weight + i * n, 0, input + row * n, 0, 1);
    return true;
}

/* The number of the layer whose experts' part of the sum a tensor is, -1 for none: see
   LayerProbe.experts. */
static int layer_of_experts(const struct filter *filter, const char *tensor)
{
    static const char prefix[] = "ffn_moe_out-";
    const size_t length = sizeof prefix - 1;
    const void *named = filter->experts == SHARED ? source_of(filter, tensor, 0) : tensor;
    const char *name = named == NULL ? "" : filter->name_of(named);
    return strncmp(name, prefix, length) == 0 ? atoi(name + length) : -1;
}

/* Which sum of the model a tensor is a part of, -1 for none: see place_of in layer_probe.py. */
static int place_of(const struct filter *filter, const char *tensor)
{
    const char *name = weight_of(filter, tensor);
    int layer;

    if (name != NULL && ends(name, ".attn_output.weight"))
        return 2 * (filter->first + atoi(name + 4));
    if (name != NULL && ends(name, ".ffn_down.weight"))
        return 2 * (filter->first + atoi(name + 4)) + 1;
    if (filter->experts != NO_EXPERTS && (layer = layer_of_experts(filter, tensor)) >= 0)
        return 2 * (filter->first + layer) + 1;
    return -1;
}

bool pipeinfer_layer_filter(void *tensor, bool ask, void *data)
{
    struct filter *filter = data;
    const char *name;
    int place;

    if (filter->wants == ENDED)  /* see LayerProbe._call */
        return ask;
    if (filter->sliced && (place = place_of(filter, tensor)) >= 0) {
        if (ask)
            return true;
        if (filter->sums == NULL)
            return filter->reached(tensor, ask, NULL);
        if (pipeinfer_sum(filter->sums, filter->data_of(tensor),
                          filter->bytes_of(tensor) / sizeof(float), place) == GO)
            return true;
        filter->wants = ENDED;
        return false;
    }
    if (filter->row_by_row && is_router(filter, tensor))
        return ask || by_rows(filter, tensor) || filter->reached(tensor, ask, NULL);
    if (filter->enters && strcmp(filter->name_of(tensor), filter->entry) == 0)
        return ask || filter->reached(tensor, ask, NULL);
    if (filter->wants == NOTHING)
        return false;
    if (!ask)
        return filter->reached(tensor, ask, NULL);
    name = filter->name_of(tensor);
    if (strcmp(name, filter->last) == 0)
        return true;
    return filter->wants == SOME && strncmp(name, "l_out-", 6) == 0
        && (atoi(name + 6) + 1) % filter->stride == 0;
}
