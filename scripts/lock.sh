# Sourced by what installs into .venv: wait until no other script of this clone does, then hold the
# lock until this script ends. The lock is a symbolic link to its owner's process number: making one
# is atomic everywhere, and macOS has no flock.
lock_said=
until ln -s $$ .setup-lock 2>/dev/null; do
    lock_owner=$(readlink .setup-lock || true)
    if [ -n "$lock_owner" ] && ! kill -0 "$lock_owner" 2>/dev/null; then
        rm -f .setup-lock # of a script that was killed
        continue
    fi
    [ -n "$lock_said" ] ||
        printf '[setup] waiting: another make (process %s) is installing into .venv\n' "$lock_owner"
    lock_said=yes
    sleep 1
done
trap 'rm -f .setup-lock' EXIT
