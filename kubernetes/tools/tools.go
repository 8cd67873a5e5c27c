//go:build tools

// Package tools names the programs that the tests of the controller need, so that their versions are locked. `cargo
// xtask kube` builds them.
package tools

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
