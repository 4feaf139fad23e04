//! The values of a GGUF header's keys.

/// A value. Numbers are widened to 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A floating-point number.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array of strings.
    Texts(Vec<String>),
    /// An array of numbers or booleans.
    Numbers(Numbers),
    /// An array of arrays.
    Arrays(Vec<Value>),
}

/// An array of numbers in the file's own encoding, which takes no more memory than the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers {
    ty: u32,
    bytes: Vec<u8>,
}

impl Numbers {
    pub(super) fn new(ty: u32, bytes: &[u8]) -> Self {
        Self { ty, bytes: bytes.to_vec() }
    }

    /// Returns the size in bytes of a number or boolean of this type; none for other types.
    pub(super) fn size_of(ty: u32) -> Option<usize> {
        match ty {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / Self::size_of(self.ty).unwrap_or(1)
    }

    /// Returns true if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns one element; none beyond the end, and for a boolean that is neither 0 nor 1.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Value> {
        let size = Self::size_of(self.ty)?;
        let bytes = self.bytes.get(index.checked_mul(size)?..)?.get(..size)?;
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        let signed = |bits: u32| (unsigned << (64 - bits)).cast_signed() >> (64 - bits);
        Some(match self.ty {
            1 => Value::Signed(signed(8)),
            3 => Value::Signed(signed(16)),
            5 => Value::Signed(signed(32)),
            11 => Value::Signed(signed(64)),
            6 => Value::Float(f32::from_bits(unsigned as u32).into()),
            12 => Value::Float(f64::from_bits(unsigned)),
            7 if unsigned > 1 => return None,
            7 => Value::Bool(unsigned == 1),
            _ => Value::Unsigned(unsigned),
        })
    }
}

impl Value {
    /// Returns the value as a size or a count.
    #[must_use]
    pub fn as_usize(&self) -> Option<usize> {
        match *self {
            Self::Unsigned(x) => usize::try_from(x).ok(),
            Self::Signed(x) => usize::try_from(x).ok(),
            _ => None,
        }
    }

    /// Returns the value as a size or a count that all layers share: one number, or an array of equal ones.
    #[must_use]
    pub fn as_one_usize(&self) -> Option<usize> {
        let Self::Numbers(numbers) = self else { return self.as_usize() };
        let first = numbers.get(0)?.as_usize()?;
        (1..numbers.len()).all(|i| numbers.get(i).and_then(|x| x.as_usize()) == Some(first)).then_some(first)
    }

    /// Returns the value as a number.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Unsigned(x) => Some(x as f64),
            Self::Signed(x) => Some(x as f64),
            Self::Float(x) => Some(x),
            _ => None,
        }
    }

    /// Returns the value as a boolean.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(x) => Some(x),
            _ => None,
        }
    }

    /// Returns the value as text.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}
