package monitor

import (
	"sync"
	"time"
)

// PublishEvery is how old a page's file may be: a goroutine copies all pages of the process to their files. A copy of
// 50 KiB takes about 15 us.
const PublishEvery = 50 * time.Millisecond

// publisher copies pages to their files while there are any.
type publisher struct {
	mu    sync.Mutex // held while pages are copied: a page that is removed is not touched any more
	pages map[*Page]bool
	stop  chan struct{} // of the goroutine that runs; nil: none does
}

var published = publisher{pages: map[*Page]bool{}}

func (u *publisher) add(p *Page) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.pages[p] = true
	if u.stop == nil {
		u.stop = make(chan struct{})
		go u.run(u.stop)
	}
}

func (u *publisher) remove(p *Page) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.pages, p)
	if len(u.pages) == 0 && u.stop != nil {
		close(u.stop)
		u.stop = nil
	}
}

func (u *publisher) run(stop <-chan struct{}) {
	tick := time.NewTicker(PublishEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			u.publishAll()
		case <-stop:
			return
		}
	}
}

// publishAll drops errors: readers see the older page, or that it is gone. A panic would end the host program.
func (u *publisher) publishAll() {
	u.mu.Lock()
	defer u.mu.Unlock()
	defer func() { _ = recover() }()
	for p := range u.pages {
		_ = p.publish()
	}
}
