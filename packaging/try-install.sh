#!/bin/sh
# Installs, upgrades, removes and purges the Debian package in a separate Debian, and checks that nothing stays behind:
#
#     packaging/try-install.sh PACKAGE.deb CACHE
#
# CACHE is a directory for the Debian that debootstrap downloads once. Needs root. systemd does not run in there, so the
# units are enabled but not started.
set -eu

fail() {
    echo "error: $1" >&2
    exit 1
}

[ $# = 2 ] || fail "usage: try-install.sh PACKAGE.deb CACHE"
package=$(realpath "$1")
mkdir -p "$2"
cache=$(realpath "$2")
[ "$(id -u)" = 0 ] || fail "missing: root. A separate Debian can only be made and entered by root"
for program in debootstrap dpkg-deb chroot; do
    command -v "$program" >/dev/null || fail "missing: $program. Run \`apt-get install debootstrap dpkg coreutils\`"
done

if [ ! -e "$cache/bookworm/complete" ]; then
    rm -rf "$cache/bookworm"
    mkdir -p "$cache/bookworm"
    debootstrap --variant=minbase --include=systemd bookworm "$cache/bookworm/root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} \
        >"$cache/bookworm/log" 2>&1 || fail "debootstrap failed: see $cache/bookworm/log"
    touch "$cache/bookworm/complete"
fi

scratch=$(mktemp -d "$cache/try.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cp -a "$cache/bookworm/root" "$scratch/root"
mkdir "$scratch/root/packages"

# The same package with the next version.
dpkg-deb --raw-extract "$package" "$scratch/next"
sed -i 's/^Version: .*/&+next/' "$scratch/next/DEBIAN/control"
dpkg-deb --root-owner-group -Zgzip -z1 --build "$scratch/next" "$scratch/root/packages/next.deb" >/dev/null
cp "$package" "$scratch/root/packages/first.deb"

cat >"$scratch/root/packages/steps.sh" <<'STEPS'
set -eu
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
check() {
    if ! eval "$2"; then
        echo "error: $1" >&2
        exit 1
    fi
    echo "ok     $1"
}
# dpkg's own records and its log differ.
list() {
    find / -xdev \( -path /proc -o -path /sys -o -path /packages -o -path /var/lib/dpkg -o -path /var/log \
        -o -path '/etc/*-' \) -prune -o -print | sort
    cat /etc/passwd /etc/group
}
list >/packages/before

dpkg -i /packages/first.deb >/packages/log 2>&1 || { cat /packages/log; exit 1; }
check "the programs run" "windlass --version && windlass-agent --version >/dev/null"
for user in windlass windlass-gateway windlass-dispatch; do
    check "user $user exists" "getent passwd $user >/dev/null"
done
link=/etc/systemd/system/multi-user.target.wants
check "only the server starts at boot" "[ \"\$(cd $link && echo windlass*)\" = windlass-server.service ]"
check "settings are readable by root only" "[ -z \"\$(find /etc/windlass -type f ! -perm 600)\" ]"

echo WINDLASS_SERVER_PORT=3100 >>/etc/windlass/server.env
echo key >/etc/windlass/master
mkdir /var/lib/windlass-server
echo data >/var/lib/windlass-server/windlass.db
rm $link/windlass-server.service
dpkg -i /packages/next.deb >/packages/log 2>&1 || { cat /packages/log; exit 1; }
check "an upgrade installs the new version" "dpkg -s windlass | grep -q '^Version: .*+next'"
check "an upgrade keeps changed settings" "grep -q PORT=3100 /etc/windlass/server.env"
check "an upgrade keeps data" "grep -q data /var/lib/windlass-server/windlass.db"
check "an upgrade does not enable a disabled server" "[ ! -e $link/windlass-server.service ]"

dpkg -r windlass >/packages/log 2>&1 || { cat /packages/log; exit 1; }
check "removal deletes the programs" "[ ! -e /usr/bin/windlass ] && [ ! -e /usr/bin/windlass-agent ]"
check "removal keeps data and settings" "[ -e /var/lib/windlass-server/windlass.db ] && [ -e /etc/windlass/server.env ]"

dpkg -P windlass >/packages/log 2>&1 || { cat /packages/log; exit 1; }
check "purge keeps files of the administrator" "grep -q key /etc/windlass/master"
rm -r /etc/windlass
list >/packages/after
check "purge leaves nothing else" "diff /packages/before /packages/after"
STEPS
chroot "$scratch/root" sh /packages/steps.sh
