// Command godoc writes the documentation of one Go package as Markdown: go run ./tools/godoc FOLDER IMPORT-PATH.
//
// Each exported name is an anchor "go-PACKAGE-NAME", so that other pages and comments can link to it.
package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/doc"
	"go/doc/comment"
	"go/format"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: godoc FOLDER IMPORT-PATH")
		os.Exit(2)
	}
	if err := write(os.Stdout, os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// page is one package on its way to Markdown; the first error of writing stays in err.
type page struct {
	out     io.Writer
	fset    *token.FileSet
	pkg     *doc.Package
	printer *comment.Printer
	err     error
}

func write(out io.Writer, folder, importPath string) error {
	fset := token.NewFileSet()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return err
	}
	var parsed []*ast.File
	for _, name := range files {
		file, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		parsed = append(parsed, file)
	}
	pkg, err := doc.NewFromFiles(fset, parsed, importPath)
	if err != nil {
		return err
	}
	p := &page{out: out, fset: fset, pkg: pkg, printer: pkg.Printer()}
	p.printer.HeadingLevel = 3
	p.printer.HeadingID = func(*comment.Heading) string { return "" }
	p.printer.DocLinkURL = func(link *comment.DocLink) string {
		name, of := link.Name, pkg.Name
		if link.Recv != "" {
			name = link.Recv + "." + name
		}
		if link.ImportPath != "" && link.ImportPath != importPath {
			if !strings.HasPrefix(link.ImportPath, path.Dir(importPath)) {
				return link.DefaultURL("https://pkg.go.dev")
			}
			of = path.Base(link.ImportPath)
		}
		return "#" + anchor(of, name)
	}
	p.whole()
	return p.err
}

func anchor(pkg, name string) string {
	return strings.ToLower("go-" + pkg + "-" + strings.ReplaceAll(name, ".", "-"))
}

func (p *page) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.out, format, args...)
	}
}

func (p *page) whole() {
	p.printf("# Go: %s\n\n```go\nimport %q\n```\n\n", p.pkg.Name, p.pkg.ImportPath)
	p.text(p.pkg.Doc)
	p.values("Constants", p.pkg.Consts)
	p.values("Variables", p.pkg.Vars)
	if len(p.pkg.Funcs) > 0 {
		p.printf("## Functions\n\n")
		p.funcs(p.pkg.Funcs)
	}
	if len(p.pkg.Types) > 0 {
		p.printf("## Types\n\n")
	}
	for _, t := range p.pkg.Types {
		p.heading("type "+t.Name, t.Name)
		p.code(t.Decl)
		p.text(t.Doc)
		p.values("", t.Consts)
		p.values("", t.Vars)
		p.funcs(t.Funcs)
		p.funcs(t.Methods)
	}
}

func (p *page) heading(title, name string) {
	p.printf("(%s)=\n### %s\n\n", anchor(p.pkg.Name, name), title)
}

func (p *page) values(title string, values []*doc.Value) {
	if title != "" && len(values) > 0 {
		p.printf("## %s\n\n", title)
	}
	for _, v := range values {
		p.code(v.Decl)
		p.text(v.Doc)
	}
}

func (p *page) funcs(funcs []*doc.Func) {
	for _, f := range funcs {
		if f.Recv == "" {
			p.heading("func "+f.Name, f.Name)
		} else {
			p.heading("func ("+f.Recv+") "+f.Name, strings.TrimPrefix(f.Recv, "*")+"."+f.Name)
		}
		p.code(f.Decl)
		p.text(f.Doc)
	}
}

// code writes a declaration as gofmt has it, with the comments of its fields.
func (p *page) code(decl ast.Decl) {
	var b bytes.Buffer
	if f, ok := decl.(*ast.FuncDecl); ok {
		f.Body, f.Doc = nil, nil
	}
	if g, ok := decl.(*ast.GenDecl); ok {
		g.Doc = nil
		for _, spec := range g.Specs {
			if t, ok := spec.(*ast.TypeSpec); ok {
				t.Doc = nil
			}
		}
	}
	if err := format.Node(&b, p.fset, decl); err != nil && p.err == nil {
		p.err = err
	}
	p.printf("```go\n%s\n```\n\n", b.String())
}

func (p *page) text(doc string) {
	p.printf("%s\n", p.printer.Markdown(p.pkg.Parser().Parse(doc)))
}
