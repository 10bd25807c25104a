# For check_full.sh and check_long.sh, which read it: missing Debian packages are installed as root,
# or with sudo, without asking. Without them steps are skipped.

# need COMMAND PACKAGE...: the packages, if the command is missing.
packages=
need() {
    command -v "$1" > /dev/null 2>&1 || [ -x "$1" ] || { shift && packages="$packages $*"; }
}

install_needed() {
    [ -n "$packages" ] || return 0
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    echo "installing$packages"
    {
        $sudo apt-get update &&
            $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
                $packages
    } > "$work/install.log" 2>&1 || {
        echo "could not install everything, see $work/install.log"
        tail -n 3 "$work/install.log"
    }
}
