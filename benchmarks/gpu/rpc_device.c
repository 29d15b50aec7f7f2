/* A plug-in for ggml: the device of an RPC server on this host, for the rehearsal of GPU checks.
   Its memory is another process's, and its arithmetic the CPU's. ggml loads the plug-in that
   GGML_BACKEND_PATH names. PIPEINFER_RPC_PORT: the first of the ports; each local rank takes its
   own, as a server has one client at a time. */

#include <stdio.h>
#include <stdlib.h>

#include "ggml-backend.h"
#include "ggml-rpc.h"

ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void) {
    const char *first = getenv("PIPEINFER_RPC_PORT"), *rank = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    char endpoint[64];
    if (first == NULL) {
        return NULL;
    }
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", atoi(first) + (rank == NULL ? 0 : atoi(rank)));
    return ggml_backend_rpc_add_server(endpoint);
}
