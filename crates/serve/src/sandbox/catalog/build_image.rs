//! Images that builds of templates start from.
//!
//! Promises: a build starts from the image that its tag means when it starts. Where the registry
//! does not answer, a build starts from an open image of that tag and its log has a warning; with
//! `skip_cache` it fails. An image is kept open for later builds, unless a reload has replaced the
//! template whose options it has.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::StatusCode;
use sha2::{Digest, Sha256};

use crate::error_response::ErrorResponse;
use crate::failure::describe;
use crate::lock::lock;
use crate::sandbox::catalog::builds::{Build, ImageGuest};
use crate::sandbox::catalog::template::{Warm, template_tag};
use crate::sandbox::catalog::template_source::TemplateSource;
use crate::sandbox::config::Template;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::tasks::blocking;
use crate::sandbox::records::record::IMAGE;

/// Maximum images that are kept open.
const MAX_IMAGES: usize = 8;

/// An image whose tag was resolved.
pub(crate) struct PinnedImage {
    /// As the client names it, with its registry.
    pub(crate) name: String,
    /// Its reference with a digest.
    pub(crate) reference: String,
}

impl Sandboxes {
    /// The image that a name means now. `is_forced` if no earlier one may stand for it.
    pub(crate) async fn pin_image(
        self: &Arc<Self>,
        build: &Build,
        name: &str,
        is_forced: bool,
    ) -> Result<PinnedImage, ErrorResponse> {
        // A refusal for the lack of memory needs no answer of a registry.
        self.memory.admit(1).await?;
        self.check_image(name)?;
        let _place = self.pull_place(&build.tenant).await?;
        let reference = format!("oci://{name}");
        let found = blocking(move || Ok(TemplateSource::find(&reference))).await?;
        let open = || lock(&self.builds.images).get(name).map(|image| image.reference.clone());
        let reference = match found {
            Ok(source) => source.reference,
            Err(error) => match open().filter(|_| error.is_outage() && !is_forced) {
                Some(earlier) => {
                    let why = describe(&error);
                    tracing::warn!(image = name, why, "a build starts from an earlier image");
                    let text = "the registry does not answer: the build starts from the image that an earlier one fetched";
                    build.log("warn", text);
                    earlier
                }
                None => return Err(unusable(name, &error)),
            },
        };
        Ok(PinnedImage { name: name.to_owned(), reference })
    }

    fn check_image(&self, name: &str) -> Result<(), ErrorResponse> {
        let allowed = &self.config.build_images;
        if allowed.iter().any(|prefix| name.starts_with(prefix.as_str())) {
            return Ok(());
        }
        let message = format!(
            "the image {name} is not allowed; the key `build-images` of the configuration lists the \
             beginnings of the names of images: {}",
            allowed.join(", ")
        );
        Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
    }

    /// The template whose options sandboxes of images have.
    fn linux_template(&self) -> Result<Arc<Warm>, ErrorResponse> {
        let templates = self.templates.all();
        templates.iter().find(|warm| warm.config.linux).cloned().ok_or_else(|| {
            let message = "a build of an image needs a template of a Linux program";
            ErrorResponse::new(StatusCode::BAD_REQUEST, message)
        })
    }

    /// An image as a template, opened once for each reload and digest.
    pub(crate) async fn image(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        image: &PinnedImage,
    ) -> Result<ImageGuest, ErrorResponse> {
        let PinnedImage { name, reference } = image;
        let open = lock(&self.builds.images).get(name).cloned();
        if let Some(open) = open.filter(|open| open.reference == *reference) {
            return Ok(open);
        }
        let _place = self.pull_place(tenant).await?;
        let digest = Sha256::digest(name);
        let digits: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let base = self.linux_template()?;
        let template = Template {
            name: format!("{IMAGE}{digits}"),
            reference: reference.clone(),
            warm: Vec::new(),
            setup: None,
            ..base.config.clone()
        };
        let opened = self.builds.opened_images.fetch_add(1, Ordering::Relaxed);
        let tag = format!("{}-{opened}", template_tag(&template.name));
        let (this, name) = (self.clone(), name.clone());
        blocking(move || {
            let opened = Warm::open_as(&this.config, &template, None, tag.clone());
            let warm = Arc::new(opened.map_err(|error| {
                this.untag(&tag);
                unusable(&name, &*error)
            })?);
            let image = ImageGuest { warm, template: base, reference: template.reference };
            this.keep_image(name, image.clone());
            Ok(image)
        })
        .await
    }

    /// Keeps an image open for later builds, unless a reload has replaced its template.
    pub(crate) fn keep_image(&self, name: String, image: ImageGuest) {
        let mut images = lock(&self.builds.images);
        // A reload exchanges the templates first, and takes the images then.
        let present = self.linux_template();
        let is_present = present.is_ok_and(|known| Arc::ptr_eq(&known, &image.template));
        let is_full = images.len() >= MAX_IMAGES && !images.contains_key(&name);
        let left: Vec<ImageGuest> = match (is_present, is_full) {
            (false, _) => vec![image],
            (true, true) => {
                let left = std::mem::take(&mut *images).into_values().collect();
                images.insert(name, image);
                left
            }
            // The tag means another image now, or another build has opened the same one.
            (true, false) => images.insert(name, image).into_iter().collect(),
        };
        drop(images);
        // Snapshots have its pages in their own states.
        left.iter().for_each(|image| self.templates.retire(&image.warm));
    }
}

fn unusable(name: &str, error: &(dyn std::error::Error + 'static)) -> ErrorResponse {
    tracing::warn!(image = name, why = describe(error), "an image cannot be opened");
    let message = format!("the image {name} cannot be used: {error}");
    ErrorResponse::new(StatusCode::BAD_REQUEST, message)
}
