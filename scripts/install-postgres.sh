#!/bin/sh
# Installs a Postgres server through the system's package manager, unless one is there already.
set -eu

for dir in $(echo "$PATH" | tr ':' ' ') /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin; do
	if [ -x "$dir/postgres" ]; then exit 0; fi
done

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

echo "installing Postgres" >&2
if command -v apt-get >/dev/null; then
	# Debian would make and start a server of its own; dlqd needs only the programs.
	as_root mkdir -p /etc/postgresql-common
	[ -e /etc/postgresql-common/createcluster.conf ] || echo 'create_main_cluster = false' | as_root tee /etc/postgresql-common/createcluster.conf >/dev/null
	as_root apt-get update -qq
	DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -qq postgresql >/dev/null
elif command -v dnf >/dev/null; then as_root dnf install -y -q postgresql-server
elif command -v apk >/dev/null; then as_root apk add -q postgresql postgresql-client
elif command -v pacman >/dev/null; then as_root pacman -S --noconfirm --quiet postgresql
elif command -v brew >/dev/null; then brew install --quiet postgresql@17
else
	echo "install a Postgres server (15 to 18) with your package manager, and run this again" >&2
	exit 1
fi
