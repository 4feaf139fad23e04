//! The forms that answers are held to, made once for all answers that have them.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use moeworks_infer::constraint::{Constraint, ConstraintError, Form, Vocabulary};
use moeworks_model::TokenTable;

use crate::api::{ApiError, ErrorKind, FormKind, FormRequest};

/// Forms of requests that are kept.
const MAX_FORMS: usize = 8;

/// The forms of the last requests, and the tokens that they are made of.
#[derive(Default)]
pub(crate) struct Forms {
    vocabulary: OnceLock<Arc<Vocabulary>>,
    /// The last one is at the end.
    known: Mutex<Vec<(FormKind, Form)>>,
}

impl Forms {
    /// The model's tokens. The first call takes a while.
    pub(crate) fn vocabulary(&self, table: impl FnOnce() -> Arc<TokenTable>) -> Arc<Vocabulary> {
        Arc::clone(self.vocabulary.get_or_init(|| Arc::new(Vocabulary::new(&table()))))
    }

    /// The form of a request. What is known of the last ones is kept.
    pub(crate) fn form(&self, request: &FormRequest) -> Result<Form, ApiError> {
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut forms = lock();
        if let Some(place) = forms.iter().position(|(kind, _)| *kind == request.kind) {
            forms[place..].rotate_left(1);
            return Ok(forms[forms.len() - 1].1.clone());
        }
        drop(forms);
        let form = request.form()?;
        let mut forms = lock();
        forms.push((request.kind.clone(), form.clone()));
        let num_old = forms.len().saturating_sub(MAX_FORMS);
        forms.drain(..num_old);
        Ok(form)
    }
}

/// A form with the name of the field or option that asked for it.
#[derive(Clone, Debug)]
pub struct NamedForm {
    /// The name of the field.
    pub field: String,
    /// The form.
    pub form: Form,
}

impl NamedForm {
    /// The beginning of an answer. `has_channels` says that it is a message of a model that answers in channels.
    pub(crate) fn constraint(self, vocabulary: Arc<Vocabulary>, has_channels: bool) -> Result<Constraint, ApiError> {
        let Self { field, form } = self;
        if has_channels {
            let message = format!("{field}: the model answers in channels, which a form does not know");
            return Err(ApiError::new(ErrorKind::Unsupported, message).of(&field));
        }
        let wrong = |error: ConstraintError| ApiError::new(ErrorKind::Invalid, format!("{field}: {error}")).of(&field);
        Constraint::new(form, vocabulary).map_err(wrong)
    }
}
