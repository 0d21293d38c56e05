package engine

// WarmupOptions are the shapes to run once so that the first real call is as fast as the steady one. Zero sizes leave
// that mode out.
type WarmupOptions struct {
	NumTokens, Hidden, NumTopK, NumExperts         int32 // normal mode
	LLMaxTokens, LLHidden, LLNumTopK, LLNumExperts int32 // low-latency mode
	UseFP8                                         bool
}
