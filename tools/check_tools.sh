#!/usr/bin/env bash
# Says in one line which of the named tools (go cc cxx python) is missing or too old, and then fails.
# Names of the programs come from GO, CC, CXX and PYTHON.
set -u
GO=${GO:-go} CC=${CC:-gcc} CXX=${CXX:-g++} PYTHON=${PYTHON:-python3}
problems=()

# at_least HAVE WANT: dotted numbers; true if HAVE is WANT or newer.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

check_go() {
	local have
	# Outside the module and without a toolchain download: the Go that is installed is the one asked about.
	have=$(cd / && GOTOOLCHAIN=local "$GO" env GOVERSION 2>/dev/null) || { problems+=("Go 1.25 or newer ('$GO' not found)"); return; }
	at_least "${have#go}" 1.25 || problems+=("Go 1.25 or newer ('$GO' is ${have#go})")
}

check_compiler() { # program, description, language
	local hint='' tool=${1##*-}
	[[ $1 != *-linux-gnu-* ]] || hint="; on Debian: apt-get install $tool-${1%"-$tool"}"
	command -v "$1" >/dev/null 2>&1 || { problems+=("$2 ('$1' not found$hint)"); return; }
	echo 'int main(void) { return 0; }' | "$1" -x "$3" -o /dev/null - 2>/dev/null || problems+=("$2 ('$1' cannot build a program)")
}

check_python() {
	local have
	have=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || { problems+=("Python 3.10 or newer ('$PYTHON' not found)"); return; }
	at_least "$have" 3.10 || { problems+=("Python 3.10 or newer ('$PYTHON' is $have)"); return; }
	"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || problems+=("the venv module of Python $have (on Debian: apt-get install python$have-venv)")
}

for tool in "$@"; do
	case $tool in
	go) check_go ;;
	cc) check_compiler "$CC" "a C compiler" c ;;
	cxx) check_compiler "$CXX" "a C++ compiler" c++ ;;
	python) check_python ;;
	*) echo "check_tools.sh: unknown tool '$tool'" >&2; exit 2 ;;
	esac
done
[ ${#problems[@]} -eq 0 ] && exit 0
text=${problems[0]}
for problem in "${problems[@]:1}"; do text+="; $problem"; done
echo "make: needed: $text" >&2
exit 1
