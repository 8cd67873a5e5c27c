//! Programs of OCI images. They have no native twin: the expected output is part of the case.

use super::case::{Image, ProgramCase};

/// A script that each image with a shell runs.
const SHELL: &str = r##"
cat /etc/os-release | grep ^ID=; for n in 3 1 2; do echo $n; done | sort | tr '\n' ' '; echo
mkdir -p a/b; echo text > a/b/c; find a -type f; wc -c < a/b/c; (exit 3) || echo "status $?"
"##;

pub(super) const IMAGES: &[ProgramCase] = &[
    ProgramCase {
        name: "Debian image",
        about: "docker.io/library/debian:12-slim: a shell, and perl",
        script: SHELL,
        image: Some(Image {
            reference: "oci://docker.io/library/debian:12-slim",
            command: &["sh"],
            output: "ID=debian\n1 2 3 \na/b/c\n5\nstatus 3\n",
        }),
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "Alpine image",
        about: "docker.io/library/alpine:3.20: a shell of busybox with musl",
        script: SHELL,
        image: Some(Image {
            reference: "oci://docker.io/library/alpine:3.20",
            command: &["sh"],
            output: "ID=alpine\n1 2 3 \na/b/c\n5\nstatus 3\n",
        }),
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "distroless image",
        about: "gcr.io/distroless/python3-debian12: Python without a shell",
        script: "import json, sys; print(json.dumps([sys.version_info[0], sum(range(10))]))",
        image: Some(Image {
            reference: "oci://gcr.io/distroless/python3-debian12:latest",
            command: &["/usr/bin/python3", "-"],
            output: "[3, 45]\n",
        }),
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "image of `docker save`",
        about: "a tar with one layer: busybox and a shell",
        needs: &["busybox", "tar", "sha256sum"],
        packages: &["busybox-static", "tar"],
        prepare: r##"
rm -rf root docker; mkdir -p root/bin root/etc root/tmp docker/one; cp "$(command -v busybox)" root/bin/busybox
for applet in sh cat grep sort tr mkdir find wc; do ln -s busybox root/bin/$applet; done; echo 'ID=own' > root/etc/os-release
tar --owner=0 --group=0 -cf docker/one/layer.tar -C root .; id=$(sha256sum < docker/one/layer.tar | cut -d ' ' -f 1)
echo '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"],"WorkingDir":"/work"},"rootfs":{"type":"layers","diff_ids":["sha256:'$id'"]}}' > docker/config.json
echo '[{"Config":"config.json","RepoTags":["own:latest"],"Layers":["one/layer.tar"]}]' > docker/manifest.json; tar -cf image.tar -C docker .
"##,
        script: SHELL,
        image: Some(Image {
            reference: "image.tar",
            command: &["sh"],
            output: "ID=own\n1 2 3 \na/b/c\n5\nstatus 3\n",
        }),
        ..ProgramCase::EMPTY
    },
];
