//! Keywords that bound numbers, and numbers of characters or items.

use super::number::{Bound, Bounds, LARGEST};
use super::wrong;
use crate::constraint::ConstraintError;
use crate::json::Json;

/// The largest bound on a number of characters or items.
const MAX_COUNT: u64 = 10_000;

/// The least and the most of a number of characters or items.
pub(super) fn counts(
    schema: &Json,
    least: &str,
    most: &str,
    place: &str,
) -> Result<(u32, Option<u32>), ConstraintError> {
    let count = |key: &str| match schema.get(key) {
        None => Ok(None),
        Some(Json::Number(number)) if number.as_u64().is_some_and(|count| count <= MAX_COUNT) => {
            Ok(number.as_u64().map(|count| count as u32))
        }
        Some(_) => Err(wrong(place, &format!("{key} must be a whole number from 0 to {MAX_COUNT}"))),
    };
    let (found_least, found_most) = (count(least)?.unwrap_or(0), count(most)?);
    match found_most {
        Some(found) if found < found_least => Err(wrong(place, &format!("{most} must be at least {least}"))),
        _ => Ok((found_least, found_most)),
    }
}

/// The bounds of a number.
pub(super) fn bounds(schema: &Json, is_integer: bool, place: &str) -> Result<Bounds, ConstraintError> {
    let bound = |key: &str, is_open: bool, is_least: bool| {
        let Some(value) = schema.get(key) else { return Ok(None) };
        let value = match value {
            Json::Number(number) => number.as_f64(),
            _ => None,
        };
        let value = value.ok_or_else(|| wrong(place, &format!("{key} must be a number")))?;
        if value.fract() == 0.0 {
            return Ok(Some(Bound { value: value as i64, is_open }));
        }
        if !is_integer {
            return Err(wrong(place, &format!("{key} of a number must be a whole one")));
        }
        // Between two whole numbers the inner one is the bound.
        let value = if is_least { value.ceil() } else { value.floor() } as i64;
        Ok(Some(Bound { value, is_open: false }))
    };
    let stricter = |first: Option<Bound>, second: Option<Bound>, is_least: bool| match (first, second) {
        (Some(first), Some(second)) => {
            let is_first = if is_least { first.value > second.value } else { first.value < second.value };
            Some(if is_first { first } else { second })
        }
        (first, second) => first.or(second),
    };
    let least = stricter(bound("minimum", false, true)?, bound("exclusiveMinimum", true, true)?, true);
    let most = stricter(bound("maximum", false, false)?, bound("exclusiveMaximum", true, false)?, false);
    let clamp = |bound: Bound| Bound { value: bound.value.clamp(-LARGEST, LARGEST), ..bound };
    Ok(Bounds { least: least.map(clamp), most: most.map(clamp) })
}
