# A machine image for deploy/cfn-gpu-serving.yaml: the pinned Deep Learning Base GPU AMI of AWS
# (Ubuntu 24.04, NVIDIA driver) with the bundle installed. How to build it: docs/deploy-aws.md.
packer {
  required_version = ">= 1.9.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.3.0, < 2.0.0"
    }
  }
}

variable "bundle" {
  type        = string
  description = "The file that make bundle wrote."
}

variable "region" {
  type    = string
  default = "us-east-1"
}

variable "subnet_id" {
  type        = string
  description = "Where the machine that builds runs: a subnet that reaches the internet."
}

variable "instance_profile" {
  type        = string
  description = "An instance profile with AmazonSSMManagedInstanceCore: Packer comes in by Session Manager, no port is opened."
}

variable "instance_type" {
  type        = string
  default     = "g6.xlarge"
  description = "Any with an NVIDIA GPU: the last step looks whether the driver is good enough."
}

variable "base_ami_name" {
  type        = string
  default     = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261006"
  description = "The pin. AWS withdraws images after a time; take the next dated one then."
}

variable "kms_key_id" {
  type        = string
  default     = ""
  description = "Your key for the snapshot; empty is the key of AWS, which other accounts cannot use."
}

source "amazon-ebs" "s4kv" {
  region               = var.region
  subnet_id            = var.subnet_id
  instance_type        = var.instance_type
  iam_instance_profile = var.instance_profile
  ami_name             = "s4kv-vllm ${formatdate("YYYY-MM-DD hhmm", timestamp())}"
  ami_description      = "s4kv-vllm on ${var.base_ami_name}"
  encrypt_boot         = true
  kms_key_id           = var.kms_key_id
  imds_support         = "v2.0"
  ssh_username         = "ubuntu"
  ssh_interface        = "session_manager"
  communicator         = "ssh"

  source_ami_filter {
    owners = ["amazon"]
    filters = {
      name                = var.base_ami_name
      architecture        = "x86_64"
      virtualization-type = "hvm"
      root-device-type    = "ebs"
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_type           = "gp3"
    volume_size           = 100
    iops                  = 3000
    throughput            = 250
    delete_on_termination = true
  }

  tags = {
    Name = "s4kv-vllm"
    base = var.base_ami_name
  }
}

build {
  sources = ["source.amazon-ebs.s4kv"]

  provisioner "file" {
    source      = var.bundle
    destination = "/tmp/bundle.tar"
  }

  provisioner "shell" {
    execute_command = "sudo bash -euo pipefail '{{ .Path }}'"
    scripts         = ["${path.root}/provision.sh"]
  }
}
