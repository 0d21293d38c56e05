package env

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// maxPath is PATH_MAX of Linux.
const maxPath = 4096

// parser reads variables and collects all errors, so that a user can correct them at once.
type parser struct {
	get func(string) string
	bad []string
}

// value is the variable without surrounding white space, which shells and job files may add.
func (p *parser) value(name string) string { return strings.TrimSpace(p.get(name)) }

func (p *parser) reject(name, value, allowed string) {
	p.bad = append(p.bad, fmt.Sprintf("variable %s: got %q, allowed %s", name, clip(value), allowed))
}

// clip keeps messages short.
func clip(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

// firstSet returns the first name that has a value, so that an error names the variable that the user has set.
func (p *parser) firstSet(names ...string) string {
	for _, n := range names {
		if p.value(n) != "" {
			return n
		}
	}
	return names[0]
}

// choice accepts one of the words, in any case; the first one is the default.
func (p *parser) choice(name string, words ...string) string {
	v := p.value(name)
	if v == "" {
		return words[0]
	}
	if i := slices.Index(words, strings.ToLower(v)); i >= 0 {
		return words[i]
	}
	p.reject(name, v, strings.Join(words, ", "))
	return words[0]
}

func (p *parser) number(name string, def, low, high int) int {
	v := p.value(name)
	if v == "" {
		return def
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < low || n > high {
		p.reject(name, v, fmt.Sprintf("a whole number from %d to %d", low, high))
		return def
	}
	return n
}

func (p *parser) millis(name string, def, low, high int) time.Duration {
	return time.Duration(p.number(name, def, low, high)) * time.Millisecond
}

func (p *parser) onOff(name string, def bool) bool {
	switch v := p.value(name); strings.ToLower(v) {
	case "":
		return def
	case "on", "1", "true", "yes":
		return true
	case "off", "0", "false", "no":
		return false
	default:
		p.reject(name, v, "on, off")
		return def
	}
}

func (p *parser) path(name string) string {
	v := p.value(name)
	if !isPath(v) {
		p.reject(name, v, fmt.Sprintf("a path of at most %d bytes without NUL", maxPath-1))
		return ""
	}
	return v
}

func isPath(s string) bool { return len(s) < maxPath && !strings.ContainsRune(s, 0) }

// netInterface accepts the name or address of a network interface. Package bootstrap checks whether it exists.
func (p *parser) netInterface(name string) string {
	v := p.value(name)
	plain := func(r rune) bool { return r != '/' && unicode.IsGraphic(r) && !unicode.IsSpace(r) }
	if len(v) > 64 || strings.IndexFunc(v, func(r rune) bool { return !plain(r) }) >= 0 {
		p.reject(name, v, "the name or address of a network interface")
		return ""
	}
	return v
}

// log accepts level[:path].
func (p *parser) log(name string) (level, path string) {
	v := p.value(name)
	if v == "" {
		return LogWarn, ""
	}
	word, path, _ := strings.Cut(v, ":")
	levels := []string{LogDebug, LogInfo, LogWarn, LogError, LogOff}
	i := slices.Index(levels, strings.ToLower(strings.TrimSpace(word)))
	if i < 0 || !isPath(path) {
		p.reject(name, v, strings.Join(levels, ", ")+", each with an optional :path after it")
		return LogWarn, ""
	}
	return levels[i], path
}
