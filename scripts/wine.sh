#!/usr/bin/env bash
# Runs tests/windows with a Windows CPython under wine. What it needs is put into .lab/wine, once per version of this file.
#
#   scripts/wine.sh [arguments for pytest]
#
# The Windows CPython comes out of panda3d's wheels, its standard library from a CPython of the same version here.
# Exit status 77: it cannot be had on this machine; the last line says why.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
lab=$PWD/.lab/wine
packages=(pytest pytest-timeout pytest-randomly anyio colorama msgspec)

cannot() {
    echo "$1"
    exit 77
}

quietly() {
    "$@" >"$lab/log" 2>&1 9>&- || { tail -n 5 "$lab/log"; return 1; }
}

install_wine() {
    local wanted missing=
    for wanted in wineboot /usr/lib/wine/wine64 x86_64-w64-mingw32-gcc unzip; do
        command -v $wanted >/dev/null || missing=$wanted
    done
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || cannot "no wine here, and no apt-get to install it with"
    [ "$(id -u)" = 0 ] || cannot "no wine here, and only root can install it"
    local debs=(wine wine64 gcc-mingw-w64-x86-64-win32 unzip)
    export DEBIAN_FRONTEND=noninteractive
    quietly apt-get install -y --no-install-recommends "${debs[@]}" ||
        { quietly apt-get update && quietly apt-get install -y --no-install-recommends "${debs[@]}"; } ||
        cannot "no wine here, and apt-get could not install it"
}

# Prints the version and the standard library of the newest CPython here that there is a wheel for.
find_library() {
    local version candidate
    for version in ${WINE_PYTHON:-3.13 3.12 3.11}; do
        for candidate in "$python" "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3; do
            "$candidate" - "$version" 2>/dev/null <<'P' && return
import sys, sysconfig
if sys.version.split(".")[:2] != sys.argv[1].split("."):
    sys.exit(1)
print(sys.argv[1], sysconfig.get_path("stdlib"))
P
        done
    done
    return 1
}

make_python() {
    local digits=${version/./} target=$lab/python-$version
    [ "$target/ready" -nt scripts/wine.sh ] && return
    rm -rf "$target" "$lab/wheel"
    mkdir -p "$target/DLLs" "$lab/wheel"
    quietly "$python" -m pip download --no-deps --only-binary :all: --platform win_amd64 --python-version "$version" \
        -d "$lab/wheel" panda3d || cannot "pip could not download the Windows CPython"
    unzip -q "$lab"/wheel/*.whl 'deploy_libs/*' -d "$lab/wheel"
    rm -f "$lab"/wheel/deploy_libs/*cp"${digits}"t*
    mv "$lab/wheel/deploy_libs/python$digits.dll" "$lab"/wheel/deploy_libs/VCRUNTIME* "$target"
    mv "$lab"/wheel/deploy_libs/*.pyd "$lab"/wheel/deploy_libs/*.dll "$target/DLLs"
    rm -rf "$lab/wheel"
    cp -r "$library" "$target/Lib"
    rm -rf "$target"/Lib/{test,lib-dynload,site-packages,dist-packages,idlelib,tkinter} "$target"/Lib/config-*
    find "$target/Lib" -name __pycache__ -prune -exec rm -rf {} +
    mkdir "$target/Lib/site-packages"
    cat >"$lab/python.c" <<'C'
#include <windows.h>

int wmain(int count, wchar_t **words) {
    HMODULE library = LoadLibraryW(LIBRARY);
    return library ? ((int (*)(int, wchar_t **))(void *)GetProcAddress(library, "Py_Main"))(count, words) : 127;
}
C
    x86_64-w64-mingw32-gcc -O2 -municode -DLIBRARY="L\"python$digits.dll\"" "$lab/python.c" -o "$target/python.exe"
    quietly "$python" -m pip install --target "$target/Lib/site-packages" --platform win_amd64 \
        --python-version "$version" --only-binary=:all: "${packages[@]}" || cannot "pip could not install the packages of the tests"
    touch "$target/ready"
}

make_prefix() {
    [ -e "$WINEPREFIX/ready" ] && return
    rm -rf "$WINEPREFIX"
    quietly wineboot -i
    quietly /usr/lib/wine/wine64 winecfg -v win10 # CPython since 3.12 does not run on wine's default, Windows 7
    touch "$WINEPREFIX/ready"
}

mkdir -p "$lab"
exec 9>"$lab/lock"
flock 9
install_wine
found=$(find_library) || cannot "no CPython 3.11, 3.12 or 3.13 here to take the standard library from"
read -r version library <<<"$found"
make_python
export WINEPREFIX=$lab/prefix WINEDEBUG=-all WINEARCH=win64
make_prefix
flock -u 9

export PYTHONPATH="Z:${PWD//\//\\}\\src" PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1
unset PYTHONHOME
# Without a pipe and an empty input this Python cannot start under wine.
/usr/lib/wine/wine64 "$lab/python-$version/python.exe" -m pytest -p no:cacheprovider tests/windows "$@" \
    9>&- </dev/null 2>&1 | cat
