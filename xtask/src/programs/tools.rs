//! Tools of every day.

use super::case::ProgramCase;

pub(super) const TOOLS: &[ProgramCase] = &[
    ProgramCase {
        name: "bash",
        about: "functions, arrays, pipes, here-documents, job control, traps",
        short: true,
        script: r##"
declare -A count
for word in a b a c a; do count[$word]=$((${count[$word]:-0} + 1)); done
echo "${count[a]} ${count[b]} ${count[c]}"
fib() { if (($1 < 2)); then echo "$1"; else echo $(($(fib $(($1 - 1))) + $(fib $(($1 - 2))))); fi; }
fib 7
sleep 0.1 & wait $!; echo "waited $?"
trap 'echo trapped' USR1; kill -USR1 $$
diff <(seq 3) <(seq 4) || true
seq 1000 | sort -rn | head -n 3 | paste -sd,
cat <<< "here"; (exit 3) || echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "coreutils, find, sed, awk",
        about: "100 files: make, find, edit, count, compare, remove",
        needs: &["find", "sed", "awk", "grep", "diff"],
        packages: &["findutils", "sed", "gawk", "grep", "diffutils"],
        short: true,
        script: r##"
mkdir -p tree/{0..6}; for n in $(seq 100); do echo "line $n of file $n" > "tree/$((n % 7))/$n.txt"; done
find tree -name '*7.txt' -type f | sort | sha256sum
find tree -type f -exec sed -i 's/line/LINE/' {} +
awk '{ sum += $2 } END { print NR, sum }' tree/*/*.txt
grep -rl 'LINE 1[0-9] ' tree | sort | xargs -n 4 basename -a | paste -sd' '
cp -a tree copy; diff -r tree copy && echo same; rm copy/1/1.txt; diff -r tree copy | head -n 1
ls -1 tree/3 | wc -l; du -a tree | wc -l; stat -c '%s %F' tree/1/1.txt
ln -s 1/1.txt tree/link; readlink -f tree/link | sed "s,$HOME,,"; mv tree moved; rm -r moved copy; ls -A
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "tar and compressors",
        about: "an archive of 400 files with gzip, bzip2, xz, zstd and lz4, and back",
        needs: &["tar", "gzip", "bzip2", "xz", "zstd", "lz4"],
        packages: &["tar", "gzip", "bzip2", "xz-utils", "zstd", "lz4"],
        script: r##"
mkdir tree; for n in $(seq 400); do seq "$n" 700 > "tree/$n"; done
pack() { tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - tree; }
pack | sha256sum
for tool in 'gzip -n' bzip2 xz zstd lz4; do
  pack | $tool -c > "packed"; ${tool%% *} -dc < packed | sha256sum
done
pack > tree.tar; mkdir out; tar -xf tree.tar -C out; diff -r tree out/tree && echo same; tar -tf tree.tar | wc -l
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "tar, gzip",
        about: "an archive of 100 files, and back",
        needs: &["tar", "gzip"],
        packages: &["tar", "gzip"],
        short: true,
        script: r##"
mkdir tree; for n in $(seq 100); do seq "$n" 300 > "tree/$n"; done
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - tree | gzip -n | tee tree.tgz | sha256sum
mkdir out; tar -xzf tree.tgz -C out; diff -r tree out/tree && echo same
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "git",
        about: "init, commits, a merge with a conflict, rebase, clone, gc, fsck, blame",
        needs: &["git"],
        packages: &["git"],
        short: true,
        script: r##"
export GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z GIT_PAGER=cat
git config --global user.name A; git config --global user.email a@example.org
git config --global init.defaultBranch main; git config --global gc.auto 0
git init -q repo; cd repo
for n in 1 2 3 4 5; do echo "$n" > "file$n"; echo "$n" >> all; git add .; git commit -qm "commit $n"; done
git log --oneline; git status --short; git checkout -qb side HEAD~2; echo side >> all; git commit -qam side
git merge main > merged 2>&1 || echo "conflict in $(git diff --name-only --diff-filter=U)"
git merge --abort; git rebase -q main > rebased 2>&1 || echo "rebase stops"; git rebase --abort
git stash -q; git checkout -q main; git tag v1; git describe --tags
git clone -q . ../clone; git -C ../clone log --format=%h -1; git gc -q; git fsck --no-progress --no-dangling; git show --stat HEAD | tail -n 1
git blame -s all | head -n 2; git grep -n 3; git archive HEAD | sha256sum
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "git status",
        about: "of a work tree with 5,000 files",
        needs: &["git"],
        packages: &["git"],
        prepare: r##"
git init -q repo; cd repo; mkdir $(seq 50)
for n in $(seq 5000); do echo "$n" > "$((n % 50 + 1))/$n"; done
git -c user.name=A -c user.email=a@example.org add .
git -c user.name=A -c user.email=a@example.org commit -qm all; git status > /dev/null
"##,
        script: r##"
git config --global safe.directory '*'; cd "$FILES/repo"; git status --short | wc -l; git ls-files | wc -l
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "vim",
        about: "edits a file by a script",
        needs: &["vim"],
        packages: &["vim"],
        script: r##"
seq 20 > text; vim -u NONE -es -c '%s/1/one/g' -c '5,10d' -c 'normal Goend' -c 'sort' -c 'wq' text || echo "status $?"
cat text
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "tmux",
        about: "a session with two panes, keys and a captured screen",
        needs: &["tmux"],
        packages: &["tmux"],
        script: r##"
export TMUX_TMPDIR=$HOME LANG=C.UTF-8 TERM=xterm
tmux -f /dev/null new-session -d -s work -x 80 -y 24 'env PS1="> " bash --norc'
for _ in $(seq 100); do tmux capture-pane -p -t work | grep -q "^>" && break; sleep 0.1; done
tmux send-keys -t work 'echo $((6 * 7)); touch done' Enter
for _ in $(seq 100); do test -e done && break; sleep 0.1; done; sleep 0.3
tmux capture-pane -p -t work | grep -v '^$'
tmux split-window -t work 'sleep 100'; tmux list-panes -t work | wc -l; tmux kill-server
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "gpg",
        about: "makes a key, signs, verifies, encrypts and decrypts",
        needs: &["gpg"],
        packages: &["gpg", "gpg-agent"],
        script: r##"
export GNUPGHOME=$HOME/keys; mkdir -m 700 "$GNUPGHOME"; echo secret > text
gpg -q --batch --passphrase '' --quick-gen-key 'A <a@example.org>' ed25519 sign 1d 2> log
fingerprint=$(gpg --list-keys --with-colons 2>> log | awk -F: '/^fpr/ { print $10; exit }')
gpg -q --batch --passphrase '' --quick-add-key "$fingerprint" cv25519 encr 1d 2>> log
gpg -q --batch --sign --output text.sig text 2>> log; gpg -q --decrypt text.sig 2> said; grep -c 'Good signature' said
gpg -q --batch --trust-model always -r a@example.org --encrypt --output text.gpg text 2>> log; gpg -q -d text.gpg 2>> log
gpgconf --kill all; echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "ssh and sshd",
        about: "a server with a key: commands, standard input, copies by scp",
        needs: &["ssh", "ssh-keygen", "/usr/sbin/sshd"],
        packages: &["openssh-client", "openssh-server"],
        script: r##"
mkdir -p /run/sshd 2> mkdir || true
mkdir -m 700 ssh; ssh-keygen -q -t ed25519 -N '' -f ssh/key; ssh-keygen -q -t ed25519 -N '' -f ssh/host
cp ssh/key.pub ssh/known; chmod 600 ssh/known
cat > ssh/sshd_config <<END
Port 22422
ListenAddress 127.0.0.1
HostKey $HOME/ssh/host
AuthorizedKeysFile $HOME/ssh/known
PidFile $HOME/ssh/pid
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
END
/usr/sbin/sshd -D -e -f ssh/sshd_config 2> ssh/log & sleep 1
options="-F none -i ssh/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
ssh $options -p 22422 "$(id -un)@127.0.0.1" 'echo hello; exit 4' || echo "status $?"
seq 100000 | ssh $options -p 22422 "$(id -un)@127.0.0.1" sha256sum
seq 1000 > one; scp -q $options -P 22422 one "$(id -un)@127.0.0.1:$HOME/two" && cmp one two && echo copied
kill %1; wait
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "curl",
        about: "gets, posts and resumes from a local HTTP server",
        needs: &["curl", "/usr/bin/python3"],
        packages: &["curl", "python3"],
        script: r##"
mkdir site; seq 20000 > site/a; echo small > site/b
/usr/bin/python3 -m http.server -b 127.0.0.1 -d site 22480 > log 2>&1 &
for _ in $(seq 100); do curl -sf http://127.0.0.1:22480/b && break; sleep 0.1; done
curl -s http://127.0.0.1:22480/a | sha256sum; curl -s -o /dev/null -w '%{http_code} %{size_download}\n' http://127.0.0.1:22480/none
curl -s --parallel http://127.0.0.1:22480/a -o one http://127.0.0.1:22480/a -o two; cmp one two && echo parallel
curl -s file://$HOME/site/b; curl -s http://127.0.0.1:9/ || echo "status $?"
kill %1; wait
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "rsync",
        about: "copies, updates and deletes 300 files",
        needs: &["rsync"],
        packages: &["rsync"],
        script: r##"
mkdir from; for n in $(seq 300); do seq "$n" > "from/$n"; done
rsync -a from/ to/; diff -r from to && echo same; echo more >> from/7; touch -d 2024-01-01 from/7; rm from/8
rsync -aiO --delete --checksum from/ to/ | sed 's/  */ /g'; diff -r from to && echo same
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "ripgrep",
        about: "searches the headers of Linux",
        needs: &["rg"],
        packages: &["ripgrep", "linux-libc-dev"],
        script: r##"
rg -c --sort path 'define +[A-Z_]+SIZE' /usr/include/linux | sha256sum; rg -l sockaddr_in6 /usr/include/linux | sort | head -n 3
rg --files /usr/include/linux | wc -l; rg nothing-of-this-name /usr/include/linux || echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "jq",
        about: "filters and groups 20,000 objects",
        needs: &["jq"],
        packages: &["jq"],
        script: r##"
seq 20000 | jq -c '{n: ., square: (. * .), even: (. % 2 == 0)}' > lines; sha256sum < lines
jq -s -c 'group_by(.even) | map({even: .[0].even, sum: (map(.n) | add)})' lines; echo '{"a":[1,{"b":null}]}' | jq .
echo '{' | jq . 2> /dev/null || echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "dpkg",
        about: "builds a package, lists it, and installs it into a root of its own",
        needs: &["dpkg", "dpkg-deb"],
        packages: &["dpkg"],
        script: r##"
mkdir -p pack/DEBIAN pack/usr/share/one; echo data > pack/usr/share/one/file
printf 'Package: one\nVersion: 1.0\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: one\n' > pack/DEBIAN/control
dpkg-deb --root-owner-group -b pack one.deb > log; dpkg-deb -c one.deb | awk '{ print $1, $2, $6 }'; dpkg-deb -f one.deb Version
mkdir -p root/var/lib/dpkg/{info,updates}; touch root/var/lib/dpkg/status
dpkg --root="$HOME/root" --force-not-root --force-bad-path --log=/dev/null -i one.deb >> log 2>&1; echo "status $?"
cat root/usr/share/one/file; dpkg --root="$HOME/root" -s one | head -n 2
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "busybox",
        about: "a script of 20 applets",
        needs: &["busybox"],
        packages: &["busybox-static"],
        script: r##"
busybox sh -c 'for n in 1 2 3; do echo $n; done | busybox tac'; echo hello | busybox md5sum; busybox seq 5 | busybox awk '{ s += $1 } END { print s }'
busybox mkdir -p a/b; busybox touch a/b/c; busybox find a | busybox sort; busybox tar -cf t.tar a; busybox tar -tf t.tar
echo text | busybox gzip | busybox zcat; busybox vi --help 2>&1 | busybox head -n 1 | busybox cut -c 1-7; busybox expr 6 '*' 7
busybox printf '%05d\n' 42; busybox cal 1 2024 | busybox head -n 1; busybox dd if=/dev/zero bs=1k count=64 2> /dev/null | busybox wc -c
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "ffmpeg",
        about: "encodes two seconds of video and sound, and decodes them",
        needs: &["ffmpeg"],
        packages: &["ffmpeg"],
        script: r##"
ffmpeg -v error -f lavfi -i testsrc=size=320x240:rate=25:duration=2 -f lavfi -i sine=440:duration=2 \
  -threads 1 -c:v mpeg4 -c:a aac -bitexact -y out.mkv
ffmpeg -v error -i out.mkv -map 0:v -f md5 -; ffmpeg -v error -i out.mkv -vf scale=64:48 -frames:v 1 -y frame.png
ffprobe -v error -show_entries stream=codec_name,width -of csv=p=0 out.mkv; ffprobe -v error -show_entries stream=width -of csv=p=0 frame.png
"##,
        ..ProgramCase::EMPTY
    },
];
