#!/bin/sh
# The first process of the machine of `make test-guest`: mounts, an engine, the tests inside.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mountpoint -q /proc || mount -t proc proc /proc
mountpoint -q /sys || mount -t sysfs sys /sys
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
modprobe -a 9pnet_virtio 9p overlay erofs loop ext4
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose repository /repository
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose site /site
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /out
ip link set lo up
dockerd --iptables=false --ip6tables=false --bridge=none --ip-masq=false >/out/dockerd.log 2>&1 &
cd /repository || poweroff -f
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/repository:/site PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
timeout 900 python3 -m pytest -c tests/guestvm/pytest.ini --rootdir /repository -p no:cacheprovider \
    -p pytest_asyncio.plugin -p pytest_timeout --timeout=600 tests/guestvm/inside -v \
    >/out/tests.log 2>&1
echo $? >/out/status
dmesg >/out/dmesg.log
sync
busybox poweroff -f
