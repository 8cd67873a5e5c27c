// The check of the Helm chart: Helm's own engine renders it, and each object is decoded strictly as its type of
// Kubernetes, so that a misspelled field or a value of a wrong type is an error.
//
// Arguments: the folder of the chart, and a file of values. `cargo xtask chart` runs it.
package main

import (
	"fmt"
	"os"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Types of the objects that the chart makes. Another kind is an error.
var types = map[string]func() any{
	"apps/v1 Deployment":                              func() any { return new(appsv1.Deployment) },
	"apps/v1 StatefulSet":                             func() any { return new(appsv1.StatefulSet) },
	"v1 Secret":                                       func() any { return new(corev1.Secret) },
	"v1 Service":                                      func() any { return new(corev1.Service) },
	"v1 ServiceAccount":                               func() any { return new(corev1.ServiceAccount) },
	"policy/v1 PodDisruptionBudget":                   func() any { return new(policyv1.PodDisruptionBudget) },
	"networking.k8s.io/v1 NetworkPolicy":              func() any { return new(networkingv1.NetworkPolicy) },
	"rbac.authorization.k8s.io/v1 Role":               func() any { return new(rbacv1.Role) },
	"rbac.authorization.k8s.io/v1 RoleBinding":        func() any { return new(rbacv1.RoleBinding) },
	"rbac.authorization.k8s.io/v1 ClusterRole":        func() any { return new(rbacv1.ClusterRole) },
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": func() any { return new(rbacv1.ClusterRoleBinding) },
}

// Kinds of other projects, whose types Kubernetes does not have.
var foreign = map[string]bool{"monitoring.coreos.com/v1 ServiceMonitor": true}

// Decodes one object, and returns a line about it.
func check(text string) (string, error) {
	var object struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        metav1.ObjectMeta `json:"metadata"`
	}
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		return "", err
	}
	kind := object.APIVersion + " " + object.Kind
	line := kind + " " + object.Metadata.Name
	if foreign[kind] {
		return line + ": a foreign kind, which is not checked", nil
	}
	typed, known := types[kind]
	if !known {
		return "", fmt.Errorf("%s is not in the list of kinds", kind)
	}
	if err := yaml.UnmarshalStrict([]byte(text), typed()); err != nil {
		return "", fmt.Errorf("%s: %w", line, err)
	}
	return line, nil
}

func run(folder, file string) error {
	chart, err := loader.Load(folder)
	if err != nil {
		return err
	}
	given, err := chartutil.ReadValuesFile(file)
	if err != nil {
		return err
	}
	options := chartutil.ReleaseOptions{Name: "trial", Namespace: "default", IsInstall: true, Revision: 1}
	values, err := chartutil.ToRenderValues(chart, given, options, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	rendered, err := engine.Render(chart, values)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(rendered))
	for name := range rendered {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		for _, text := range strings.Split(rendered[name], "\n---") {
			if !strings.HasSuffix(name, ".yaml") || strings.TrimSpace(text) == "" {
				continue
			}
			line, err := check(text)
			if err != nil {
				return fmt.Errorf("%s with %s: %w", name, file, err)
			}
			fmt.Println(line)
		}
	}
	return nil
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: chart FOLDER VALUES")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
