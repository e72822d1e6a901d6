#!/bin/sh
# Installs missing programs with the system's package manager:
#   install.sh postgres|prometheus|alertmanager|pgbouncer|nginx|redis-server|cc|curl|chromium|debootstrap|rpm|minisign ...
set -eu

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

have() {
	if [ "$1" = chromium ]; then # where the console's tests look for it
		[ -x "${DLQD_TEST_CHROMIUM:-}" ] || command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome
		return
	fi >/dev/null
	case "$1" in pgbouncer | nginx) [ -x "/usr/sbin/$1" ] && return ;; esac # not on the PATH of other users
	[ "$1" = alertmanager ] && command -v prometheus-alertmanager >/dev/null && return # Debian's name
	[ "$1" != postgres ] && { command -v "$1" >/dev/null; return; }
	for dir in $(echo "$PATH" | tr ':' ' ') /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin; do
		[ -x "$dir/postgres" ] && return
	done
	return 1
}

package() { # prints the packages of a program ($1) for a package manager ($2)
	case "$1/$2" in
	postgres/dnf) echo postgresql-server ;;
	postgres/apk) echo postgresql postgresql-client ;;
	postgres/brew) echo postgresql@17 ;;
	postgres/*) echo postgresql ;;
	alertmanager/apt-get) echo prometheus-alertmanager ;;
	chromium/apt-get) # Ubuntu has no headless shell
		if apt-cache show chromium-headless-shell >/dev/null 2>&1; then echo chromium-headless-shell; else echo chromium; fi ;;
	nginx/apt-get) echo nginx-light ;;
	redis-server/apt-get) echo redis-server ;;
	redis-server/*) echo redis ;;
	cc/apt-get) echo gcc libc6-dev ;;
	cc/apk) echo gcc musl-dev ;;
	cc/*) echo gcc ;;
	*) echo "$1" ;;
	esac
}

for thing; do
	have "$thing" && continue
	echo "installing $thing" >&2
	if command -v apt-get >/dev/null; then
		if [ "$thing" = postgres ] && [ ! -e /etc/postgresql-common/createcluster.conf ]; then
			# Debian would create and start a server; dlqd needs only the programs.
			as_root mkdir -p /etc/postgresql-common
			echo 'create_main_cluster = false' | as_root tee /etc/postgresql-common/createcluster.conf >/dev/null
		fi
		[ -n "${updated:-}" ] || as_root apt-get update -qq
		updated=yes
		# shellcheck disable=SC2046 # a program may need several packages
		as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(package "$thing" apt-get) >/dev/null
		case "$thing" in
		prometheus | alertmanager) # Debian also starts them as services; dlqd needs only the programs.
			as_root systemctl disable --quiet --now prometheus prometheus-alertmanager prometheus-node-exporter 2>/dev/null || true
			;;
		pgbouncer | nginx | redis-server) as_root systemctl disable --quiet --now "$thing" 2>/dev/null || true ;;
		esac
	elif command -v dnf >/dev/null; then as_root dnf install -y -q $(package "$thing" dnf)
	elif command -v apk >/dev/null; then as_root apk add -q $(package "$thing" apk)
	elif command -v pacman >/dev/null; then as_root pacman -S --noconfirm --quiet $(package "$thing" pacman)
	elif command -v brew >/dev/null; then brew install --quiet $(package "$thing" brew)
	else
		echo "no supported package manager found: install $thing, then run this again" >&2
		exit 1
	fi
done
