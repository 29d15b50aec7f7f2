/* llama.cpp's evaluation callback for the nodes of a graph that are not wanted.

   llama.cpp calls it for every node to find out whether the node is wanted; on a deep model these are
   thousands of calls per token. Only outputs of layers reach Python; partial results of sums go to
   sums.c. See eval_callback.py, whose struct Filter has the same fields. Loaded with ctypes: needs
   neither Python's nor llama.cpp's headers. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sums.h"

enum { NOTHING, LAST, SOME, ENDED };
enum { MOST_EXPERTS = 512 };  /* llama.cpp's own limit */
enum { NO_EXPERTS, ALONE, SHARED };  /* see EvalCallback.experts */

struct filter {
    const char *(*name_of)(const void *tensor);           /* ggml_get_name */
    bool (*reached)(void *tensor, bool ask, void *data);  /* EvalCallback */
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
    const struct router *routers;  /* by layer; NULL: the slice has a part of every expert */
    const char *weights;           /* beginning of the name of the drawn experts' weights */
    int n_experts, n_drawn, first_expert, n_own;
    const void *input, *drawn;     /* of the layer being computed: see select_experts */
    const char *again;             /* NULL, or behind which node rows are put in once more */
};

/* The router of a layer: one row of weights per expert, and their biases or NULL. */
struct router {
    const float *weights, *biases;
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
   EvalCallback.experts. */
static int layer_of_experts(const struct filter *filter, const char *tensor)
{
    static const char prefix[] = "ffn_moe_out-";
    const size_t length = sizeof prefix - 1;
    const void *named = filter->experts == SHARED ? source_of(filter, tensor, 0) : tensor;
    const char *name = named == NULL ? "" : filter->name_of(named);

    if (strncmp(name, "mtp_", 4) == 0)  /* a prediction head's */
        name += 4;
    return strncmp(name, prefix, length) == 0 ? atoi(name + length) : -1;
}

/* Which sum of the model a tensor is a part of, -1 for none: see place_of in eval_callback.py. */
static int place_of(const struct filter *filter, const char *tensor)
{
    const char *name = weight_of(filter, tensor);
    int layer;

    if (name != NULL && (ends(name, ".attn_output.weight") || ends(name, ".ssm_out.weight")))
        return 2 * (filter->first + atoi(name + 4));
    if (name != NULL && ends(name, ".ffn_down.weight"))
        return 2 * (filter->first + atoi(name + 4)) + 1;
    if (filter->experts != NO_EXPERTS && (layer = layer_of_experts(filter, tensor)) >= 0)
        return 2 * (filter->first + layer) + 1;
    return -1;
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

/* Note what `select_experts` will need, while the tensors before it are being listed. */
static void note(struct filter *filter, const char *tensor)
{
    if (is_router(filter, tensor))
        filter->input = source_of(filter, tensor, 1);
    else if (begins(filter->name_of(tensor), "ffn_moe_topk-"))
        filter->drawn = tensor;
}

/* Of a slice that has whole experts: replace the experts of each row by those of all slices that it
   draws, and their weights by the softmax of the routers' products. Experts of other slices get the
   weight 0 and the number of one that is computed anyway. See EvalCallback.select_among. */
static bool select_experts(struct filter *filter, const char *tensor, int layer)
{
    const struct router *router = &filter->routers[layer];
    const int count = filter->n_drawn, first = filter->first_expert;
    const float *input;
    float *weight = filter->data_of(tensor), products[MOST_EXPERTS];
    int32_t *drawn;
    int64_t rows, row;
    int n, i, k;

    if (filter->input == NULL || filter->drawn == NULL
        || filter->bytes_of(filter->input) != sizeof(float) * filter->elements_of(filter->input))
        return false;  /* Python raises the error */
    input = filter->data_of(filter->input);
    drawn = filter->data_of(filter->drawn);
    rows = filter->rows_of(filter->input);
    n = (int)(filter->elements_of(filter->input) / (rows > 0 ? rows : 1));
    for (row = 0; row < rows; row++, drawn += filter->n_own, weight += count) {
        int own = 0;
        float most = 0.0f, sum = 0.0f;
        for (i = 0; i < filter->n_experts; i++) {
            filter->dot(n, products + i, 0, router->weights + (size_t)i * n, 0, input + row * n, 0, 1);
            if (router->biases != NULL)
                products[i] += router->biases[i];
        }
        for (k = 0; k < count; k++) {
            int best = 0;
            for (i = 1; i < filter->n_experts; i++)
                if (products[i] > products[best])
                    best = i;
            if (k == 0)
                most = products[best];
            weight[k] = expf(products[best] - most);
            sum += weight[k];
            drawn[k] = best - first;
            products[best] = -INFINITY;
        }
        for (k = count - 1; k >= 0; k--)
            if (drawn[k] >= 0 && drawn[k] < filter->n_own)
                own = drawn[k];
        for (k = 0; k < count; k++) {
            bool here = drawn[k] >= 0 && drawn[k] < filter->n_own;
            weight[k] = here ? weight[k] / sum : 0.0f;
            drawn[k] = here ? drawn[k] : own;
        }
    }
    return true;
}

bool pipeinfer_layer_filter(void *tensor, bool ask, void *data)
{
    struct filter *filter = data;
    const char *name;
    int place;

    if (filter->wants == ENDED)  /* see EvalCallback._call */
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
    if (filter->routers != NULL) {
        name = filter->name_of(tensor);
        if (begins(name, filter->weights) && strchr(name, ' ') == NULL)
            return ask || select_experts(filter, tensor, atoi(name + strlen(filter->weights)))
                || filter->reached(tensor, ask, NULL);
        if (ask)
            note(filter, tensor);
    }
    if (filter->row_by_row && is_router(filter, tensor))
        return ask || by_rows(filter, tensor) || filter->reached(tensor, ask, NULL);
    if (filter->enters) {
        name = filter->name_of(tensor);
        if (strcmp(name, filter->entry) == 0
            || (filter->again != NULL && strcmp(name, filter->again) == 0))
            return ask || filter->reached(tensor, ask, NULL);
    }
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
