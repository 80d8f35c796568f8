#!/usr/bin/env bash
# Runs an MPI program on two "hosts" of this machine: two network namespaces, each with its own host name, connected
# by a pair of virtual network cards only. Needs root.
#
#   two_hosts.sh MPIRUN RANKS_PER_HOST PROGRAM [ARGUMENT]...
#
# Exits with 77 where the system does not allow it, with the reason on the standard error.
set -euo pipefail
mpirun=$1 per_host=$2
shift 2

near=swa$$ far=swb$$ # namespaces and host names
net=10.77.0
work=$(mktemp -d)

clean_up() {
    trap - EXIT INT TERM HUP
    for host in "$near" "$far"; do
        # Ranks that outlive mpirun would keep the namespace alive.
        pids=$(ip netns pids "$host" 2>/dev/null || true)
        [ -z "$pids" ] || kill -9 $pids 2>/dev/null || true
        ip netns del "$host" 2>/dev/null || true # takes its end of the pair along, and with it the other
        rm -rf "/etc/netns/$host"
    done
    ip link del "swe$$a" 2>/dev/null || true # if it had not been moved yet
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

unavailable() {
    echo "two hosts cannot be set up here: $1" >&2
    exit 77
}
command -v ip >/dev/null || unavailable "there is no ip command (package iproute2)"
[ "$(id -u)" = 0 ] || unavailable "only root can create network namespaces"
ip netns add "$near" 2>"$work/why" && ip netns add "$far" 2>"$work/why" || unavailable "$(cat "$work/why")"
ip link add "swe$$a" type veth peer name "swe$$b" 2>"$work/why" || unavailable "$(cat "$work/why")"
unshare --uts true 2>"$work/why" || unavailable "$(cat "$work/why")"

ip link set "swe$$a" netns "$near" name sw0
ip link set "swe$$b" netns "$far" name sw0
ip -n "$near" addr add $net.1/24 dev sw0
ip -n "$far" addr add $net.2/24 dev sw0
for host in "$near" "$far"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set sw0 up
    # Mounted over /etc/hosts by ip netns exec: both names resolve on both sides.
    mkdir -p "/etc/netns/$host"
    printf '127.0.0.1 localhost\n%s.1 %s\n%s.2 %s\n' $net "$near" $net "$far" >"/etc/netns/$host/hosts"
done

# Stands in for ssh: HOST COMMAND..., to be run by a shell there. Hosts differ by name, too: MPI takes processes under one
# name for neighbours that share memory.
cat >"$work/enter" <<'END'
#!/usr/bin/env bash
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts bash -c 'hostname "$1"; shift; exec bash -c "$*"' enter "$host" "$@"
END
chmod +x "$work/enter"

if "$mpirun" --version 2>&1 | grep -q 'Open MPI\|OpenRTE'; then
    command=("$mpirun" --host "$near:$per_host,$far:$per_host" -n $((2 * per_host))
        --mca plm rsh --mca plm_rsh_agent "$work/enter" --mca pml ob1 --mca btl tcp,self,vader
        --mca btl_tcp_if_include $net.0/24 --mca oob_tcp_if_include $net.0/24)
else
    # Left to itself MPICH finds shared memory, which the two sides have in common here and real hosts have not.
    export UCX_TLS=tcp,self UCX_NET_DEVICES=sw0 FI_PROVIDER=tcp FI_TCP_IFACE=sw0
    command=("$mpirun" -hosts "$near:$per_host,$far:$per_host" -n $((2 * per_host))
        -launcher ssh -launcher-exec "$work/enter" -iface sw0)
fi
# In the background, so that a signal to this script is handled at once.
"$work/enter" "$near" exec "${command[@]@Q}" "${@@Q}" &
wait $!
echo "bytes that crossed:" $(ip netns exec "$near" cat /sys/class/net/sw0/statistics/{rx,tx}_bytes)
