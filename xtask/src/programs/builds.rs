//! Compilers, build systems and package managers.

use super::case::ProgramCase;

pub(super) const BUILDS: &[ProgramCase] = &[
    ProgramCase {
        name: "gcc, make",
        about: "a program of four files: build, run, change one, build again",
        needs: &["gcc", "make"],
        packages: &["gcc", "libc6-dev", "make"],
        short: true,
        script: r##"
for n in 1 2 3; do echo "int f$n(int x) { return x * $n; }" > "f$n.c"; done
echo '#include <stdio.h>
int f1(int); int f2(int); int f3(int); int main(void) { printf("%d\n", f1(1) + f2(2) + f3(3)); return 0; }' > main.c
printf 'OBJECTS = main.o f1.o f2.o f3.o\nprogram: $(OBJECTS)\n\t@gcc -o $@ $^\n%%.o: %%.c\n\t@echo cc $<\n\t@gcc -O1 -c $<\n' > Makefile
make; ./program; sleep 0.01; echo 'int f3(int x) { return x; }' > f3.c; touch -d '+2 seconds' f3.c; make; ./program
make -q || echo "to be made again"; objdump -f program 2> /dev/null | grep -c x86-64; nm program | grep -c ' T f'
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "make -j2",
        about: "40 C files",
        needs: &["gcc", "make"],
        packages: &["gcc", "libc6-dev", "make"],
        script: r##"
for n in $(seq 40); do echo "#include <stdio.h>
int f$n(int x) { return x + $n; }" > "f$n.c"; done
{ for n in $(seq 40); do echo "int f$n(int);"; done; echo '#include <stdio.h>'; echo 'int main(void) { int x = 0;'
for n in $(seq 40); do echo "x = f$n(x);"; done; echo 'printf("%d\n", x); return 0; }'; } > main.c
printf 'program: %s\n\t@gcc -o $@ $^\n%%.o: %%.c\n\t@gcc -O2 -c $<\n' "main.o $(seq -f f%g.o -s ' ' 40)" > Makefile
make -j2; ./program
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "cmake, ctest",
        about: "configures, builds and tests a C++ library",
        needs: &["cmake", "ctest", "g++", "make"],
        packages: &["cmake", "g++", "make"],
        script: r##"
echo '#include <string>
std::string twice(const std::string& s) { return s + s; }' > lib.cc
echo '#include <iostream>
#include <string>
std::string twice(const std::string&); int main() { std::cout << twice("ab") << "\n"; return twice("ab") != "abab"; }' > test.cc
echo 'cmake_minimum_required(VERSION 3.13)
project(p CXX)
enable_testing()
add_library(l SHARED lib.cc)
add_executable(t test.cc)
target_link_libraries(t l)
add_test(NAME twice COMMAND t)' > CMakeLists.txt
cmake -S . -B build > log; tail -n 3 log | head -n 1 | sed 's/ (.*//'; cmake --build build > log; grep -c Built log; cd build; ctest | grep 'tests passed'; ./t
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "go",
        about: "builds and tests a program with goroutines, an HTTP server and a child",
        needs: &["go"],
        packages: &["golang-go"],
        prepare: r##"
export GOCACHE=$FILES/cache GOFLAGS=-mod=mod GOTOOLCHAIN=local CGO_ENABLED=0 HOME=$FILES; mkdir -p src; cd src
echo 'module p
go 1.19' > go.mod
echo 'package main
import ("fmt"; "io"; "net"; "net/http"; "os/exec"; "sync")
func Sum(n int) int { var wg sync.WaitGroup; var mu sync.Mutex; s := 0
for i := 0; i < n; i++ { wg.Add(1); go func(i int) { defer wg.Done(); mu.Lock(); s += i; mu.Unlock() }(i) }; wg.Wait(); return s }
func main() { fmt.Println(Sum(1000)); l, e := net.Listen("tcp", "127.0.0.1:0"); if e != nil { panic(e) }
go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "path "+r.URL.Path) }))
for i := 0; i < 50; i++ { r, e := http.Get(fmt.Sprintf("http://%s/%d", l.Addr(), i)); if e != nil { panic(e) }
b, _ := io.ReadAll(r.Body); r.Body.Close(); if i == 49 { fmt.Println(string(b)) } }
out, e := exec.Command("echo", "child").Output(); fmt.Print(string(out), e, "\n") }' > main.go
echo 'package main
import "testing"
func TestSum(t *testing.T) { if Sum(10) != 45 { t.Fatal("wrong") } }' > main_test.go
go build -o "$FILES/warm" . && go vet . && go test .
"##,
        script: r##"
export GOCACHE=$FILES/cache GOFLAGS=-mod=mod GOTOOLCHAIN=local CGO_ENABLED=0
cp -r "$FILES/src" .; cd src; echo '// changed' >> main.go; go build -o program . && ./program; go test . | awk '{ print $1, $2 }'
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "cargo",
        about: "builds, tests and runs a crate",
        needs: &["cargo", "rustc", "cc"],
        packages: &["cargo", "rustc", "gcc", "libc6-dev"],
        script: r##"
export CARGO_HOME=$HOME/cargo CARGO_TERM_QUIET=true CARGO_INCREMENTAL=0; mkdir -p p/src; cd p
printf '[package]\nname = "p"\nversion = "0.1.0"\nedition = "2021"\n' > Cargo.toml
cat > src/main.rs <<'END'
use std::{collections::HashMap, process::Command, thread};
fn sum(n: u64) -> u64 { (1..=4).map(|k| thread::spawn(move || (1..=n).map(|x| x * k).sum::<u64>())).map(|t| t.join().unwrap()).sum() }
fn main() {
    let mut words = HashMap::new();
    for word in "a b a".split(' ') { *words.entry(word).or_insert(0) += 1; }
    println!("{} {}", sum(1000), words["a"]);
    print!("{}", String::from_utf8(Command::new("echo").arg("child").output().unwrap().stdout).unwrap());
}
#[test] fn sums() { assert_eq!(sum(1), 10); }
END
cargo build --offline; cargo run --offline; cargo test --offline 2>&1 | grep 'test result' | cut -d ';' -f 1
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "pip, venv, pytest",
        about: "a virtual environment with four packages, and tests in it",
        needs: &["/usr/bin/python3"],
        packages: &["python3", "python3-venv"],
        prepare: r##"
mkdir -p wheels; /usr/bin/python3 -m venv tools; tools/bin/pip -q download -d wheels pytest requests attrs click
rm -rf tools
"##,
        script: r##"
/usr/bin/python3 -m venv env; . env/bin/activate; pip -q --disable-pip-version-check install --no-index --find-links "$FILES/wheels" pytest requests attrs click
pip --disable-pip-version-check list --format=freeze | grep -c ==
mkdir t; printf 'import attr, click, requests, pytest\n@attr.s\nclass A:\n    x = attr.ib(default=1)\n@pytest.mark.parametrize("n", range(50))\ndef test_n(n, tmp_path):\n    (tmp_path / "f").write_text(str(n)); assert int((tmp_path / "f").read_text()) == n and A().x == 1\n' > t/test_a.py
pytest -q t | sed 's/ in .*//' | tail -n 1; printf 'def test_no():\n    assert 1 == 2\n' > t/test_b.py; pytest -q t > log || echo "status $?"; grep -c '^E ' log
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "npm ci",
        about: "installs 60 packages from a cache, and runs a script of one",
        needs: &["npm", "node"],
        packages: &["npm", "nodejs"],
        prepare: r##"
export HOME=$FILES; mkdir -p app; cd app
echo '{"name": "app", "version": "1.0.0", "private": true, "scripts": {"hello": "node -e \"console.log(require(\\\"lodash\\\").chunk([1,2,3], 2))\""}, "dependencies": {"express": "4.19.2", "lodash": "4.17.21"}}' > package.json
npm install --package-lock-only --no-audit --no-fund --loglevel=error; npm ci --cache "$FILES/cache" --no-audit --no-fund --loglevel=error; rm -rf node_modules
"##,
        script: r##"
cp "$FILES"/app/package*.json .; cp -r "$FILES/cache" cache
npm ci --offline --cache "$HOME/cache" --no-audit --no-fund --loglevel=error | sed 's/ in .*//'; ls node_modules | wc -l; npm run -s hello
node -e 'const app = require("express")(); app.get("/", (q, r) => r.send("express")); const s = app.listen(0, "127.0.0.1", async () => { console.log(await (await fetch("http://127.0.0.1:" + s.address().port)).text()); process.exit(0) })'
"##,
        ..ProgramCase::EMPTY
    },
];
