/* Answers llama.cpp's evaluation callback for the nodes of a graph that nobody asked for.

   llama.cpp asks for every node whether it is wanted; on a deep model these are thousands of
   questions per token. Only outputs of layers reach Python. See layer_probe.py, whose struct
   Filter has the same fields. Loaded with ctypes: needs neither Python's nor llama.cpp's headers. */

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { NOTHING, LAST, SOME, ENDED };

struct filter {
    const char *(*name_of)(const void *tensor);           /* ggml_get_name */
    bool (*reached)(void *tensor, bool ask, void *data);  /* LayerProbe */
    const char *last;                                     /* name of the last layer's output */
    int wants;
    int stride;  /* SOME: the output of each so many layers, and the last */
};

bool pipeinfer_layer_filter(void *tensor, bool ask, void *data)
{
    const struct filter *filter = data;
    const char *name;

    switch (filter->wants) {
    case NOTHING:
        return false;
    case ENDED:  /* see LayerProbe._call */
        return ask;
    default:
        if (!ask)
            return filter->reached(tensor, ask, NULL);
        name = filter->name_of(tensor);
        if (strncmp(name, "l_out-", 6) != 0)
            return false;
        return (filter->wants == SOME && (atoi(name + 6) + 1) % filter->stride == 0)
            || strcmp(name, filter->last) == 0;
    }
}
