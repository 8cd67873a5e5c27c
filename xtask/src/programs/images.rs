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
        name: "image in a tar",
        about: "an archive of the OCI layout with one layer: busybox and a shell",
        needs: &["busybox", "tar", "sha256sum"],
        packages: &["busybox-static", "tar"],
        prepare: r##"
rm -rf root layout; mkdir -p root/bin root/etc root/tmp layout/blobs/sha256; cp "$(command -v busybox)" root/bin/busybox
for applet in sh cat grep sort tr mkdir find wc; do ln -s busybox root/bin/$applet; done; echo 'ID=own' > root/etc/os-release
put() { digest=$(sha256sum < "$1" | cut -d ' ' -f 1); size=$(wc -c < "$1"); mv "$1" "layout/blobs/sha256/$digest"; printf '"digest":"sha256:%s","size":%s' "$digest" "$size"; }
tar --owner=0 --group=0 -cf layer -C root .; id=$(sha256sum < layer | cut -d ' ' -f 1); layer=$(put layer)
echo '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"],"WorkingDir":"/work"},"rootfs":{"type":"layers","diff_ids":["sha256:'$id'"]}}' > config; config=$(put config)
o=application/vnd.oci.image; echo '{"schemaVersion":2,"mediaType":"'$o.manifest.v1+json'","config":{"mediaType":"'$o.config.v1+json'",'$config'},"layers":[{"mediaType":"'$o.layer.v1.tar'",'$layer'}]}' > manifest
echo '{"schemaVersion":2,"manifests":[{"mediaType":"'$o.manifest.v1+json'",'$(put manifest)'}]}' > layout/index.json; echo '{"imageLayoutVersion":"1.0.0"}' > layout/oci-layout; tar -cf image.tar -C layout .
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
