// Command sbom prints the modules of a Go program as CycloneDX JSON: "sbom bin/dlqd".
package main

import (
	"fmt"
	"os"

	"github.com/dlqd/dlqd/tools/internal/bom"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: sbom PROGRAM")
		os.Exit(2)
	}
	if err := bom.Write(os.Stdout, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}
