#include "comm/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- choosing -------------------------------------------------------------------------------- */

/* The network of an interface that is up. */
static void find_address(struct network_choice *c)
{
    struct ifaddrs *list = NULL;
    if (getifaddrs(&list) != 0)
        return;
    for (const struct ifaddrs *a = list; a != NULL && c->address_mask == 0; a = a->ifa_next) {
        if (a->ifa_addr == NULL || a->ifa_netmask == NULL || a->ifa_addr->sa_family != AF_INET ||
            (a->ifa_flags & IFF_UP) == 0 || strcmp(a->ifa_name, c->interface) != 0)
            continue;
        struct sockaddr_in address, mask;
        memcpy(&address, a->ifa_addr, sizeof address);
        memcpy(&mask, a->ifa_netmask, sizeof mask);
        c->address_mask = mask.sin_addr.s_addr;
        c->address_net = address.sin_addr.s_addr & mask.sin_addr.s_addr;
    }
    freeifaddrs(list);
}

void network_choose(struct network_choice *c, const struct topology *t,
                    const struct affinity_rank *r)
{
    size_t used = 0;
    memset(c, 0, sizeof *c);
    for (int n = 0; n < t->nic_count; n++)
        c->any_fabric |= t->nics[n].up && t->nics[n].fabric[0] != '\0';
    for (int i = 0; i < r->nic_count && r->gpu >= 0; i++) {
        const char *name = t->nics[r->nics[i]].fabric;
        if (name[0] == '\0' || topology_distance(t, r->gpu, r->nics[i]) > TOPOLOGY_BRIDGE ||
            used + strlen(name) + 2 > sizeof c->fabrics)
            continue;
        used += (size_t)snprintf(c->fabrics + used, sizeof c->fabrics - used, "%s%s",
                                 used > 0 ? "," : "", name);
    }
    if (r->interface < 0)
        return;
    snprintf(c->interface, sizeof c->interface, "%s", t->nics[r->interface].interface);
    find_address(c);
}

/* ---- telling NCCL ---------------------------------------------------------------------------- */

/* Does a line of the file set @name? */
static bool file_says(const char *path, const char *name)
{
    char line[512];
    bool says = false;
    FILE *file = fopen(path, "re");
    while (file != NULL && !says && fgets(line, sizeof line, file) != NULL) {
        const char *at = line + strspn(line, " \t");
        size_t bytes = strlen(name);
        says = strncmp(at, name, bytes) == 0 && at[bytes + strspn(at + bytes, " \t")] == '=';
    }
    if (file != NULL)
        fclose(file);
    return says;
}

static bool is_said(const char *name)
{
    const char *conf = getenv("NCCL_CONF_FILE"), *home = getenv("HOME");
    char path[1024] = "";
    if (getenv(name) != NULL || file_says("/etc/nccl.conf", name))
        return true;
    if (conf == NULL && home != NULL)
        snprintf(path, sizeof path, "%s/.nccl.conf", home);
    return file_says(conf != NULL ? conf : path, name);
}

/* "=": these names and not what begins like them. */
static void say(const char *name, const char *value, char *text, size_t bytes)
{
    char exact[160];
    size_t used = strlen(text);
    if (value[0] == '\0' || is_said(name))
        return;
    snprintf(exact, sizeof exact, "=%s", value);
    if (setenv(name, exact, 0) == 0)
        snprintf(text + used, bytes - used, "%s%s=%s", used > 0 ? " " : "", name, exact);
}

void network_announce(const struct network_choice *all, int count, int mine, char *text,
                      size_t bytes)
{
    bool sockets = true;
    text[0] = '\0';
    for (int r = 0; r < count; r++)
        sockets &= !all[r].any_fabric && all[r].address_mask != 0 &&
                   all[r].address_net == all[0].address_net &&
                   all[r].address_mask == all[0].address_mask;
    say("NCCL_IB_HCA", all[mine].fabrics, text, bytes);
    if (sockets)
        say("NCCL_SOCKET_IFNAME", all[mine].interface, text, bytes);
}
