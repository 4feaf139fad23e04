use std::sync::{Arc, Mutex};

use super::{DeviceBlock, DeviceMemory};
use crate::{DType, MemoryPool, Tensor};

/// Device memory that is a vector, shared with the test.
struct Fake(Arc<Mutex<Vec<u8>>>, usize);

impl DeviceMemory for Fake {
    fn address(&self) -> u64 {
        7
    }

    fn device(&self) -> usize {
        self.1
    }

    fn download(&self, to: &mut [u8]) {
        to.copy_from_slice(&self.0.lock().unwrap()[..to.len()]);
    }
}

fn upload(seen: &Arc<Mutex<Vec<u8>>>) -> impl FnOnce(&[u8]) -> DeviceBlock {
    let seen = Arc::clone(seen);
    move |bytes| {
        *seen.lock().unwrap() = bytes.to_vec();
        Box::new(Fake(seen, 0))
    }
}

#[test]
fn what_the_host_wrote_is_uploaded_once() {
    let (pool, device) = (MemoryPool::new(), Arc::default());
    let tensor = Tensor::from_slice(&pool, &[2], &[1.0_f32, 2.0]);
    assert!(tensor.is_in_host());
    assert_eq!(tensor.device_address(0, upload(&device)), 7);
    assert_eq!(*device.lock().unwrap(), tensor.bytes());
    assert_eq!(tensor.clone().device_address(0, |_| panic!("uploaded twice")), 7);
    assert!(tensor.is_in_host());
}

#[test]
fn what_the_device_wrote_is_what_the_host_reads() {
    let (pool, device) = (MemoryPool::new(), Arc::default());
    let mut tensor = Tensor::from_slice(&pool, &[2], &[1_u32, 2]);
    _ = tensor.device_address_mut(0, upload(&device));
    assert!(!tensor.is_in_host());
    device.lock().unwrap()[0] = 5;
    assert_eq!(tensor.u32s(), [5, 2]);
}

#[test]
fn what_the_host_writes_later_is_uploaded_again() {
    let (pool, device) = (MemoryPool::new(), Arc::default());
    let mut tensor =
        Tensor::from_device(&pool, &[1], DType::U32, Box::new(Fake(Arc::new(Mutex::new(vec![3, 0, 0, 0])), 0)));
    assert_eq!(tensor.u32s(), [3]);
    tensor.u32s_mut()[0] = 4;
    _ = tensor.device_address(0, upload(&device));
    assert_eq!(*device.lock().unwrap(), [4, 0, 0, 0]);
}

#[test]
fn memory_lent_by_others_is_uploaded_once_and_never_written() {
    let device = Arc::default();
    let owner: crate::Bytes = Arc::new(vec![1_u8, 0, 0, 0]);
    let mut tensor = Tensor::from_foreign(owner, 0..4, &[1], DType::U32).unwrap();
    _ = tensor.device_address(0, upload(&device));
    assert_eq!(tensor.clone().device_address(0, |_| panic!("uploaded twice")), 7);
    let write = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| tensor.device_address_mut(0, |_| panic!())));
    assert!(write.is_err());
}

#[test]
fn a_tensor_has_a_block_on_each_device_that_reads_it_and_one_after_a_device_has_written() {
    let (pool, [first, second]) = (MemoryPool::new(), [(); 2].map(|()| Arc::new(Mutex::new(Vec::new()))));
    let on = |device: usize, seen: &Arc<Mutex<Vec<u8>>>| {
        let seen = Arc::clone(seen);
        move |bytes: &[u8]| -> DeviceBlock {
            *seen.lock().unwrap() = bytes.to_vec();
            Box::new(Fake(seen, device))
        }
    };
    let mut tensor = Tensor::from_slice(&pool, &[2], &[1_u32, 2]);
    _ = tensor.device_address(1, on(1, &first));
    _ = tensor.device_address(2, on(2, &second));
    for device in [1, 2] {
        _ = tensor.device_address(device, |_| panic!("uploaded twice"));
    }
    assert_eq!(*second.lock().unwrap(), tensor.bytes());
    _ = tensor.device_address_mut(2, on(2, &second));
    second.lock().unwrap()[0] = 7;
    first.lock().unwrap().clear();
    // The result of the second device is copied by way of the host.
    _ = tensor.device_address(1, on(1, &first));
    assert_eq!(*first.lock().unwrap(), [7, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(tensor.u32s(), [7, 2]);
}
