//! What the steps of a build leave for later steps, apart from files.

use std::collections::BTreeMap;

use crate::sandbox::catalog::build_request::Action;
use crate::sandbox::http::user::User;

/// Where commands start, as in E2B.
const HOME: &str = "/home/user";

/// The user, the directory and the variables of later steps and of commands.
#[derive(Clone)]
pub(super) struct StepEnvironment {
    pub(super) user: User,
    pub(super) directory: Option<String>,
    pub(super) envs: BTreeMap<String, String>,
}

impl StepEnvironment {
    /// Applies a step that runs nothing.
    pub(super) fn follow(&mut self, action: &Action) {
        match action {
            Action::Directory(path) => self.directory = Some(self.path(path)),
            Action::Environment(set) => self.envs.extend(set.clone()),
            Action::User(user) => self.user = *user,
            _ => {}
        }
    }

    /// Where steps start, whichever user runs them.
    pub(super) fn directory(&self) -> &str {
        self.directory.as_deref().unwrap_or(HOME)
    }

    /// The same for a step with another user.
    pub(super) fn of(&self, user: Option<User>) -> Self {
        Self { user: user.unwrap_or(self.user), ..self.clone() }
    }

    /// A path in the sandbox, below the directory where it is relative.
    pub(super) fn path(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", self.directory().trim_end_matches('/')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_follow_one_another() {
        let mut around =
            StepEnvironment { user: User::User, directory: None, envs: BTreeMap::new() };
        around.follow(&Action::Directory("app".to_owned()));
        assert_eq!(around.path("x"), "/home/user/app/x");
        around.follow(&Action::Directory("/srv/".to_owned()));
        around.follow(&Action::Directory("web".to_owned()));
        assert_eq!((around.path("/y").as_str(), around.path("x").as_str()), ("/y", "/srv/web/x"));
    }
}
