// Package bom lists the modules of a Go program as CycloneDX JSON.
package bom

import (
	"debug/buildinfo"
	"io"
	"runtime/debug"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// Write writes the software bill of materials of a program. It reads the build information in the program. So it lists
// only the modules that the program contains, not all modules of go.mod.
func Write(w io.Writer, program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	main := component(&info.Main)
	main.Type = cdx.ComponentTypeApplication
	parts := []cdx.Component{{
		Type: cdx.ComponentTypeLibrary, BOMRef: "std", Name: "std",
		Version: info.GoVersion, PackageURL: "pkg:golang/std@" + info.GoVersion,
	}}
	uses := []string{"std"}
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		part := component(module)
		parts = append(parts, part)
		uses = append(uses, part.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &main}
	bom.Components = &parts
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &uses}}
	return cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

func component(module *debug.Module) cdx.Component {
	url := "pkg:golang/" + module.Path
	if module.Version != "" && module.Version != "(devel)" {
		url += "@" + module.Version
	}
	return cdx.Component{
		Type: cdx.ComponentTypeLibrary, BOMRef: url, Name: module.Path, Version: module.Version, PackageURL: url,
	}
}
