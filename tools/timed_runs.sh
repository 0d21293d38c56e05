# timed_runs.sh - to be sourced by scripts that run many commands within a limit: `run`, which writes a log for each to $out, and a
# line to $out/summary.txt. The script sets `out`, `end` (of its SECONDS) and `counted`: 1 while commands are tests, which say how
# many passed. ONLY="NAME ...": only these runs.

# run NAME SECONDS [VARIABLE=VALUE ...] -- COMMAND
run() {
	local name=$1 seconds=$2 settings=()
	shift 2
	while [ "$1" != -- ]; do settings+=("$1"); shift; done
	shift
	[ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return ;; esac
	local left=$((end - SECONDS)) start=$SECONDS verdict=passed counts
	[ "$left" -ge 10 ] || { echo "LEFT OUT $name: no time" >>"$out/summary.txt"; return; }
	[ "$seconds" -le "$left" ] || seconds=$left
	env "${settings[@]}" timeout -k 3 "$seconds" "$@" >"$out/$name.log" 2>&1 || verdict="FAILED ($?)"
	counts=$(grep -E '[0-9]+ (passed|failed|error|skipped)|cases (passed|FAILED)|ERROR SUMMARY' "$out/$name.log" | tail -n 2 | paste -sd ' ')
	[[ $verdict != passed || $counted = 0 || $counts == *passed* ]] || verdict="NOTHING RAN"
	echo "$verdict $name ($((SECONDS - start)) s): $counts" >>"$out/summary.txt"
}

# all_passed: the exit status of such a script.
all_passed() { ! grep -q '^FAILED' "$out/summary.txt"; }
