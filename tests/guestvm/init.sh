#!/bin/sh
# The first process of the machine of `make test-guest`: mounts, an engine, the tests inside.
# What the disk's own begin (image.py) did: proc, sys, this repository.
mount -t securityfs security /sys/kernel/security
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs run /run
mount -t tmpfs -o size=1g tmp /tmp
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs cgroups /sys/fs/cgroup
for group in cpu cpuacct cpuset memory devices freezer blkio pids; do
    mkdir -p /sys/fs/cgroup/$group
    mount -t cgroup -o $group $group /sys/fs/cgroup/$group
done
mkdir -p /sys/fs/cgroup/unified /sys/fs/cgroup/systemd
mount -t cgroup2 unified /sys/fs/cgroup/unified
mount -t cgroup -o none,name=systemd systemd /sys/fs/cgroup/systemd
modprobe -a overlay erofs loop ext4 xfs
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose site /site
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /out
ip link set lo up
dockerd --iptables=false --ip6tables=false --bridge=none --ip-masq=false >/out/dockerd.log 2>&1 &
cd /repository || poweroff -f
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/repository:/site PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# shellcheck disable=SC2046
timeout 1200 python3 -m pytest -c tests/guestvm/pytest.ini --rootdir /repository \
    -p no:cacheprovider -p pytest_asyncio.plugin -p pytest_timeout --timeout=600 -v --durations=15 \
    $(cat /out/arguments) >/out/tests.log 2>&1
echo $? >/out/status
dmesg >/out/dmesg.log
sync
busybox poweroff -f
